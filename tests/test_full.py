"The full comparison's runner: its order, what stops it and how it goes on; with a made-up DVC, and with a real one on made-up stages."
import json, os, re, shutil, signal, subprocess, sys, threading

import pandas as pd
import pytest, yaml

from clinical_rl import core, full
from conftest import ROOT, copy_project, run, until

@pytest.fixture
def toy(tmp_path):
    "A made-up project: (root, its working copy, command in the place of dvc)."
    base = tmp_path/'project'
    return base, base/'out'/'full'/'project', full.toy_project(base)

def ran(copy): # targets of `dvc repro`, in the order of the calls
    return [l.split()[-1] for l in (copy/'calls.txt').read_text().splitlines() if l.startswith('repro')]

def steps(copy): return [t for t in ran(copy) if '@' in t]

def table(base): return pd.read_csv(base/'reports'/'full'/'cells.csv')

def start(base, dvc, *args): # a full run in a process of its own
    code = f'import sys; from clinical_rl.full import main; sys.exit(main({["--root", str(base), *args]}, {dvc}))'
    env = {k: v for k, v in os.environ.items() if k != 'CLINICAL_RL_ROOT'} | {'PYTHONPATH': str(ROOT)}
    # a shell that starts tests in the background has them ignore Ctrl-C, and so would what they start
    return subprocess.Popen([sys.executable, '-c', code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))

def test_order_of_worth(toy, capsys):
    "What all share, items before text, every split of a seed before the next seed; scored once at the end, for it was quick."
    base, copy, dvc = toy
    assert full.run_full(base, dvc=dvc).done.all()
    L = 'landscape'
    assert ran(copy) == [*full.SHARED, *(f'items@{L}-{s}-{n}' for n in (1, 2) for s in ('temporal', 'drug')),
                         *(t for n in (1, 2) for t in (f'train@{L}-temporal-bc-{n}', f'train@{L}-temporal-iql-{n}', f'policies@{L}-temporal-{n}')), 'evaluate']
    assert [l for l in (copy/'calls.txt').read_text().splitlines() if 'evaluate' in l] == ['repro -s evaluate'], '-s: missing cells are not made'
    said = capsys.readouterr().out
    assert '[step 6 of 6] text landscape 2 temporal' in said and 'about 0.0 h left' in said and 'All 12 cells are done.' in said
    assert (base/'reports'/'full'/'results.csv').read_text() == 'split,value\ntemporal,0.5\n'
    m = json.loads((base/'reports'/'full'/'machine.json').read_text())
    assert set(m) == {'cpu', 'cores', 'memory_gib', 'python', 'torch', 'hours'}

def test_second_call_makes_nothing(toy):
    base, copy, dvc = toy
    full.run_full(base, dvc=dvc); (copy/'calls.txt').unlink()
    full.run_full(base, dvc=dvc)
    assert steps(copy) == []

def test_scored_now_and_then(toy):
    base, copy, dvc = toy
    full.run_full(base, dvc=dvc, every=0)
    assert ran(copy).count('evaluate') == 7, 'after each of six steps, and at the end'

def hold(copy, target): # the made-up DVC waits at this target until the file is gone
    (copy/'held').mkdir(parents=True, exist_ok=True); (copy/'held'/target).touch()
    return copy/'held'/target

def called(copy, target): return (copy/'calls.txt').exists() and target in ran(copy)

def is_free(base):
    try:
        with full.one_run(base/'out'/'full'): return True
    except core.DataError: return False

def test_goes_on_after_a_kill(toy):
    "SIGKILL: while the dvc that it left behind still works, a second run is refused; then it goes on with what is missing."
    base, copy, dvc = toy
    held = hold(copy, 'items@landscape-drug-1')
    p = start(base, dvc)
    until(lambda: called(copy, held.name))
    p.kill(); p.wait()
    with pytest.raises(core.DataError, match=rf'another full run is going on in .* \(process {p.pid}\)'): full.run_full(base, dvc=dvc)
    held.unlink(); until(lambda: is_free(base))
    before = steps(copy)
    assert full.run_full(base, dvc=dvc).done.all()
    assert before == ['items@landscape-temporal-1', 'items@landscape-drug-1']
    assert steps(copy)[2:4] == ['items@landscape-temporal-2', 'items@landscape-drug-2'], 'what the first had made is not made again'

@pytest.mark.parametrize('sig', [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_hand(toy, sig):
    "Its dvc is stopped too, one line says how to go on, the minutes are in the log."
    base, copy, dvc = toy
    hold(copy, full.SHARED[0])
    p = start(base, dvc)
    assert "Running stage 'baseline'" in p.stdout.readline()
    p.send_signal(sig)
    assert p.wait(600) == 130 and p.stdout.read().splitlines()[-1] == 'Stopped; `make full` goes on from here.'
    assert is_free(base), 'nothing of it is left'
    log = pd.read_csv(base/'out'/'full'/'log.csv')
    assert log.target.tolist() == [full.SHARED[0]] and not log.done.any()

def test_time_limit(toy, monkeypatch, capsys):
    "The step that overruns is stopped, what is done is scored, what is missing is named; the next call goes on."
    base, copy, dvc = toy
    held = hold(copy, 'items@landscape-temporal-2')
    class Timer(threading.Timer): # an hour is over as soon as the third step is under way
        def run(self):
            intervals.append(self.interval)
            while not called(copy, held.name):
                if self.finished.wait(.01): return
            self.function()
    intervals = []; monkeypatch.setattr(full.threading, 'Timer', Timer)
    done = full.run_full(base, hours=1, dvc=dvc).done
    assert list(done) == [True]*4 + [False]*8 and 0 < min(intervals) and intervals[0] <= 3600 and intervals == sorted(intervals, reverse=True)
    said, page = capsys.readouterr().out, (base/'reports'/'full'/'results.html').read_text()
    assert 'The time given is over.' in said
    for text in (said, page): assert f'{done.sum()} of 12 cells are done. Missing: items, landscape, temporal: ' in text and 'text, landscape, temporal: seeds 1, 2.' in text
    assert table(base).done.tolist() == done.tolist() and is_free(base)
    assert ran(copy)[-1] == 'evaluate'
    held.unlink()
    assert full.run_full(base, dvc=dvc).done.all()

def test_no_time_for_what_all_share(toy):
    base, copy, dvc = toy
    hold(copy, full.SHARED[0])
    with pytest.raises(core.DataError, match='the time given was over before the stages that all cells share'): full.run_full(base, hours=1e-9, dvc=dvc)
    assert not (base/'reports').exists()

def test_no_step_that_does_not_fit(toy):
    "By the log a step takes an hour: with half an hour left none is begun."
    base, copy, dvc = toy
    copy.mkdir(parents=True)
    core.write_csv(pd.DataFrame(dict(target=['items@landscape-temporal-9'], minutes=[60.], done=[True])), base/'out'/'full'/'log.csv')
    assert not full.run_full(base, hours=.5, dvc=dvc).done.any()
    assert steps(copy) == []

def test_changed_inputs_are_not_scored(toy):
    "Predictions whose inputs changed are made anew; with no time for that they count as missing and are not there to be scored."
    base, copy, dvc = toy
    full.run_full(base, dvc=dvc)
    (copy/'stale').mkdir(); (copy/'stale'/'train@landscape-temporal-bc-2').touch(); (copy/'calls.txt').unlink()
    core.write_csv(pd.DataFrame(dict(target=['policies@landscape-temporal-1'], minutes=[60.], done=[True])), base/'out'/'full'/'log.csv')
    left = full.run_full(base, hours=.5, dvc=dvc)
    assert left[~left.done].drop_duplicates('seed')[['form', 'seed']].values.tolist() == [['text', 2]]
    assert not (copy/'out'/'predictions'/'policy-text-landscape-temporal-2.parquet').exists()

def test_two_failures_in_a_row_end_it(toy, capfd):
    base, copy, dvc = toy
    (copy/'broken').mkdir(parents=True)
    for s in ('temporal', 'drug'): (copy/'broken'/f'items@landscape-{s}-1').touch()
    with pytest.raises(core.DataError, match=r'2 step\(s\) failed: items landscape 1 temporal; items landscape 1 drug'): full.run_full(base, dvc=dvc)
    assert steps(copy) == ['items@landscape-temporal-1', 'items@landscape-drug-1'] and not table(base).done.any()
    assert 'stage items@landscape-temporal-1 of the full run failed' in capfd.readouterr().err

def edit(path, old, new): path.write_text(path.read_text().replace(old, new))

@pytest.mark.parametrize('breaks, words', [
    (lambda b, m: edit(b/'params.yaml', 'max_programs', 'max_progams'), ["params.yaml: unknown key 'data.max_progams'"]),
    (lambda b, m: edit(b/'params_full.yaml', 'seeds', 'seds'), ["params_full.yaml: unknown key 'policies.seds'", "'policies.seeds'"]),
    (lambda b, m: (b/'params_full.yaml').write_text('policies: ['), ['params_full.yaml: not valid YAML']),
    (lambda b, m: (b/'params_full.yaml').unlink(), ['params_full.yaml is missing', 'git checkout']),
    (lambda b, m: m.setattr(shutil, 'disk_usage', lambda p: shutil._ntuple_diskusage(20e9, 11e9, 9e9)), ['9.0 GB are free', 'needs 10', 'free some']),
    (lambda b, m: shutil.rmtree(b/'.git'), ['git ls-files', 'git clone of the project'])], ids=['params', 'changes', 'yaml', 'no changes', 'disk', 'no git'])
def test_one_line_errors(toy, monkeypatch, capfd, breaks, words):
    base, copy, dvc = toy
    breaks(base, monkeypatch); monkeypatch.setenv('CLINICAL_RL_ROOT', '/elsewhere') # a root that is named wins
    assert full.main(['--root', str(base)], dvc) == 1
    err = capfd.readouterr().err
    assert err.startswith('error: ') and err.count('\n') == 1 and all(w in err for w in words), err

def test_page_too_large(toy):
    "The tables are there; the page is not written."
    base, copy, dvc = toy
    done = full.run_full(base, dvc=dvc)
    old = (base/'reports'/'full'/'results.html').read_bytes()
    with pytest.raises(core.DataError, match='more than 0.0'): full.publish(base, copy, done, pd.read_csv(base/'out'/'full'/'log.csv'), max_bytes=1000)
    assert (base/'reports'/'full'/'results.html').read_bytes() == old

# --- a real DVC --------------------------------------------------------------------------------------------------------

def matrix(**keys): return {k: '${policies.%s}' % v for k, v in keys.items()}

@pytest.fixture
def real(tmp_path):
    "The made-up project with real DVC stages that copy a word: (root, working copy)."
    base = tmp_path/'project'
    full.toy_project(base, seeds=[1]); (base/'data').mkdir(); (base/'data'/'x.txt').write_text('fact')
    raw = yaml.safe_load((base/'params.yaml').read_text())
    raw['policies'] = dict(items=dict(scopes=['landscape'], splits=['temporal'], objectives=['bc']), text=dict(scopes=['landscape'], splits=['temporal'], objectives=['bc']), seeds=[1])
    (base/'params.yaml').write_text(yaml.safe_dump(raw))
    (base/'params_full.yaml').write_text('policies: {seeds: [1, 2]}\n')
    cell, key = '${item.scope}-${item.split}-${item.seed}', lambda f, **more: matrix(scope=f'{f}.scopes', split=f'{f}.splits', **more, seed='seeds')
    pred = 'out/predictions/policy-%s-' + cell + '.parquet'
    stages = {s: dict(cmd=f'mkdir -p out && cp data/x.txt out/{s}.txt && echo {s} >> ../count.txt', deps=['data'], outs=[f'out/{s}.txt']) for s in full.SHARED}
    stages['items'] = dict(matrix=key('items'), cmd=f'mkdir -p out/predictions && echo hello > {pred % "items"}', deps=['out/select.txt'], params=['train.lr'], outs=[pred % 'items'])
    train = 'out/adapters/' + cell
    stages['train'] = dict(matrix=matrix(scope='text.scopes', split='text.splits', objective='text.objectives', seed='seeds'), deps=['out/encode.txt'],
                           cmd=f'mkdir -p {train} && echo hello > {train}/' + '${item.objective}', outs=[train + '/${item.objective}'])
    stages['policies'] = dict(matrix=key('text'), cmd=f'mkdir -p out/predictions && echo hello > {pred % "text"}', deps=[train], outs=[pred % 'text'])
    stages['evaluate'] = dict(cmd='mkdir -p reports/metrics && ls out/predictions > reports/metrics/results.csv', deps=['out/predictions'],
                              outs=[{'reports/metrics/results.csv': dict(cache=False, persist=True)}])
    (base/'dvc.yaml').write_text(yaml.safe_dump(dict(stages=stages), sort_keys=False)) # the order of a matrix makes the names
    (base/'data.dvc').unlink()
    (base/'.gitignore').write_text('/out\n/data\n/.dvcstore\n')
    run(base, 'dvc', 'init', '-q', check=True); run(base, 'dvc', 'remote', 'add', '-q', '-d', 'store', base/'.dvcstore', check=True)
    run(base, 'dvc', 'add', '-q', 'data', check=True); run(base, 'dvc', 'push', '-q', check=True)
    run(base, 'git', 'add', '-A', check=True)
    return base, base/'out'/'full'/'project'

def test_real_dvc(real, monkeypatch):
    "The copy takes over what the project has made, and the project does not notice the copy."
    base, copy = real
    monkeypatch.delenv('CLINICAL_RL_ROOT', raising=False)
    run(base, 'dvc', 'repro', check=True); run(base, 'git', 'add', '-A', check=True)
    made, tree = (base/'..'/'count.txt').read_text(), run(base, 'git', 'status', '--porcelain').stdout
    assert full.run_full(base).done.all()
    assert (base/'..'/'count.txt').read_text() == made and not (base/'out'/'full'/'count.txt').exists(), 'shared stages come from the cache'
    assert set(pd.read_csv(base/'out'/'full'/'log.csv').target) == {'items@landscape-temporal-2', 'train@landscape-temporal-bc-2', 'policies@landscape-temporal-2', 'evaluate'}
    assert 'up to date' in run(base, 'dvc', 'status', check=True).stdout
    assert 'Running stage' not in run(base, 'dvc', 'repro', check=True).stdout
    assert len(run(base, 'dvc', 'stage', 'list', '--name-only').stdout.split()) == len(full.SHARED) + 4, 'the stages of the copy are not counted'
    assert [l for l in run(base, 'git', 'status', '--porcelain').stdout.splitlines() if 'reports/full' not in l] == tree.splitlines()

    raw = yaml.safe_load((base/'params.yaml').read_text()); raw['train']['lr'] = .5 # of items alone, here
    (base/'params.yaml').write_text(yaml.safe_dump(raw))
    log = pd.read_csv(base/'out'/'full'/'log.csv')
    core.write_csv(log.assign(minutes=600.), base/'out'/'full'/'log.csv') # no time for a step
    left = full.run_full(base, hours=1)
    assert left.groupby('form').done.all().to_dict() == dict(items=False, text=True), 'old predictions are not scored'
    assert (base/'reports'/'full'/'results.csv').read_text().split() == ['policy-text-landscape-temporal-1.parquet', 'policy-text-landscape-temporal-2.parquet']
    assert full.run_full(base).done.all()

def test_the_projects_stages_are_those_it_runs(tmp_path, monkeypatch):
    "In a copy of this very project: every target is a stage of dvc.yaml, and writes the file that is waited for."
    monkeypatch.delenv('CLINICAL_RL_ROOT', raising=False)
    base = copy_project(tmp_path/'project'); copy = base/'out'/'full'/'project'
    params, raw = full.full_params(base)
    full.make_copy(base, copy, raw, [shutil.which('dvc', path=os.path.dirname(sys.executable))])
    assert len(list((copy/'data').iterdir())) == len(list((base/'data').iterdir())) > 0
    stages = dict(l.split(maxsplit=1) for l in run(copy, 'dvc', 'stage', 'list', check=True).stdout.splitlines())
    lock = run(copy, 'python', '-c', 'import json; from dvc.repo import Repo; print(json.dumps({s.addressing: [str(o) for o in s.outs] for s in Repo().index.stages}))', check=True)
    outs = json.loads(lock.stdout.splitlines()[-1])
    table = full.cells(params)
    assert len(table) == 160 and params.evaluate.partial
    for _, step in table.groupby(full.KEY, sort=False):
        assert set(full.targets(step)) <= set(stages)
        assert full.prediction_file(step) in outs[full.targets(step)[-1]]
    assert all(s in stages or any(k.startswith(f'{s}@') for k in stages) for s in full.SHARED)

@pytest.mark.skipif(not (ROOT/'reports'/'full').exists(), reason='no full run is committed')
def test_committed_results():
    "Every cell that was asked for is listed, the page says which are missing, no link is dead."
    at = ROOT/'reports'/'full'
    table, page = pd.read_csv(at/'cells.csv'), (at/'results.html').read_text()
    want = full.cells(full.full_params(ROOT)[0])
    assert table[full.CELL].values.tolist() == want[full.CELL].values.tolist()
    assert full.missing_words(table) in page
    for href in re.findall(r'href="([^"#:]+)["#]', page): assert (at/href).exists(), href
    scored, cell = pd.read_csv(at/'results.csv'), [c for c in full.CELL if c != 'seed'] # a row for all seeds together
    scored = scored[scored.form.isin(['items', 'text'])].groupby(cell).n_seeds.unique()
    assert scored.map(list).to_dict() == table[table.done].groupby(cell).seed.nunique().map(lambda n: [n]).to_dict()
