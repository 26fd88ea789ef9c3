"The whole DVC graph, from a fresh copy, on a few programs and a few steps: it runs, it repeats itself, it fails well."
import hashlib, os, re, signal, subprocess, time

import pandas as pd
import pytest, yaml

from conftest import BIN, copy_project, run

TINY = { # dotted key of params.yaml -> value: a few programs, a few steps, one setting of each grid
    'threads': 1, # a second process would spend longer on its imports than on its share of the work
    'data.max_programs': 6, 'splits.names': ['temporal', 'drug'], 'features.splits': ['temporal', 'drug'], 'evaluate.bootstrap': 200, 'evaluate.permutations': 200,
    'baselines.last_window.max_back': [4], 'baselines.frequency.half_life_months': [18], 'baselines.frequency.prior': [0.1],
    'baselines.class_prior.half_life_months': [18], 'baselines.class_prior.kappa': [1], 'baselines.nearest.k': [10], 'baselines.nearest.half_life_months': [18],
    'baselines.logistic.C': [0.01], 'baselines.boosting.max_iter': [10], 'baselines.average.max_iter': [10],
    'prompts.max_tokens': 160, 'lora.layers': 2, 'lora.rank': 2, 'train.epochs': 1, 'decode.samples': 2, 'decode.max_items': 6,
    'policies.text.objectives': ['bc'], 'policies.items.splits': ['temporal', 'drug'], 'policies.items.objectives': ['bc', 'iql'],
    'weights.folds': 2, 'weights.iql.steps': 50, 'weights.iql.hidden': 32,
    'items.folds': 2, 'items.queries': 4, 'items.depth': 2, 'items.layers': 1, 'items.hidden': 8, 'items.train.epochs': 1,
    'select.origins': ['2019-02-01', '2020-02-01'], 'select.lr': [1e-3],
    'simulator.seeds': 2, 'simulator.programs': 60, 'simulator.sizes': [50, 100], 'simulator.iql.steps': 60,
    'tools.embedding.max_tokens': 8, 'tools.recall.questions': 20, 'tools.recall.dates': ['2016-02-01'],
    'agents.local.windows': 2, 'agents.local.shots': [0], 'agents.local.max_tokens': 16, 'probes.windows': 4, 'probes.max_items': 2, 'probes.trials': 3,
}
MADE = ['out/notebooks', 'out/predictions', 'out/forecasts', 'out/adapters', 'out/items', 'out/select', 'out/anchors', 'out/weights', 'out/records', 'out/episodes', 'out/index', 'out/agents', 'out/probes', 'reports']

def set_params(root, **changes):
    "Change values of params.yaml by dotted key, keeping the rest."
    f = root/'params.yaml'
    raw = yaml.safe_load(f.read_text())
    for key, value in changes.items():
        *path, last = key.split('.')
        d = raw
        for k in path: d = d[k]
        assert last in d, f'{key} is not in params.yaml'
        d[last] = value
    f.write_text(yaml.safe_dump(raw, sort_keys=False))

def stages_run(out): return re.findall(r"Running stage '([^']+)'", out)

def digests(root, *folders): # path -> sha256 of every file of the folders
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
            for f in folders for p in sorted((root/f).rglob('*')) if p.is_file()}

@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    "The copy, after one whole run."
    root = copy_project(tmp_path_factory.mktemp('pipeline')/'project')
    set_params(root, **TINY)
    r = run(root, 'dvc', 'repro')
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-6000:]
    return root

def test_every_page_and_table_is_made(tiny):
    for f in ('index', 'data', 'episodes', 'training', 'simulator', 'agents', 'probes', 'results'):
        html = (tiny/'reports'/f'{f}.html').read_text()
        assert '<img' in html or f == 'index', f'{f}.html has no figure'
        assert 'Traceback' not in html
    res = pd.read_csv(tiny/'reports'/'metrics'/'results.csv')
    methods = set(yaml.safe_load((tiny/'params.yaml').read_text())['baselines']['methods'])
    for scope in ('landscape', 'sponsor'):
        for split in ('temporal', 'drug'):
            part = res[(res.scope == scope) & (res.split == split)]
            assert methods <= set(part.method), (scope, split)
    main = res[(res.scope == 'landscape') & (res.split == 'temporal') & (res.metric == 'indication_f1')]
    policy = main[main.method == 'policy']
    runs = set(policy[['form', 'objective']].itertuples(index=False, name=None))
    assert runs == {('text', 'bc'), ('items', 'bc'), ('items', 'iql'), ('frozen', 'bc'), ('features', 'bc')}, 'both forms, and the ablations of the items form'
    drug = res[(res.split == 'drug') & (res.method == 'policy')]
    assert set(drug.form) == {'items', 'frozen', 'features'} and set(drug.scope) == {'landscape'}
    agents = main[main.method == 'agent'].set_index('form')
    assert set(agents.index) == {'heuristic', 'base_0_shot'}
    rule = main[main.method == 'frequency'].iloc[0]
    assert (agents.loc['heuristic', ['value', 'lo', 'hi', 'n_episodes']] == rule[['value', 'lo', 'hi', 'n_episodes']]).all(), 'the rule through the tools is the baseline'
    main = main[main.method != 'agent'] # the base model answers one or two windows here: no interval
    assert (main.lo <= main.value).all() and (main.value <= main.hi).all() and main.n_programs.between(1, 8).all()

def test_second_run_does_nothing(tiny):
    start = time.perf_counter()
    r = run(tiny, 'dvc', 'repro', check=True)
    assert stages_run(r.stdout) == []
    print(f'second repro: {time.perf_counter() - start:.1f} s') # reported, not judged: machines differ

def test_one_baseline_parameter_reruns_only_what_depends_on_it(tiny):
    before = (tiny/'params.yaml').read_text()
    set_params(tiny, **{'baselines.nearest.k': [3, 7]})
    r = run(tiny, 'dvc', 'repro', check=True)
    assert set(stages_run(r.stdout)) == {'baseline@nearest', 'evaluate', 'agent_scores', 'probes', 'report'}
    (tiny/'params.yaml').write_text(before)
    run(tiny, 'dvc', 'repro', check=True)

def test_forced_rerun_gives_the_same_bytes(tiny):
    before = digests(tiny, *MADE)
    assert {'items', 'select', 'anchors', 'weights', 'index', 'agents', 'probes'} <= {f.split('/')[1] for f in before}, 'each folder holds something to compare'
    run(tiny, 'dvc', 'repro', '-f', check=True)
    after = digests(tiny, *MADE)
    assert {k for k in before | after if before.get(k) != after.get(k)} == set()

# --- what goes wrong ---------------------------------------------------------------------------------------------------

def fails_with(root, *words, target='ingest'):
    "`dvc repro` fails, prints one line with all the words, and the reports of the last good run stay as they were."
    good = digests(root, 'reports')
    r = run(root, 'dvc', 'repro', target)
    text = r.stdout + r.stderr
    lines = [l for l in text.splitlines() if l.startswith('error in stage')]
    assert r.returncode != 0 and len(lines) == 1, text[-3000:]
    assert not (missing := [w for w in words if w not in lines[0]]), f'{missing} not in: {lines[0]}'
    assert 'Traceback' not in text, text[-3000:]
    assert digests(root, 'reports') == good
    return lines[0]

@pytest.fixture
def broken(tiny, tmp_path):
    "The tiny project with its data free to break; whatever a test does to data and params is undone, what `dvc repro` made of it is not."
    saved = {p: p.read_bytes() for p in [*(tiny/'data').iterdir(), tiny/'params.yaml', tiny/'data.dvc']}
    yield tiny
    for p, b in saved.items():
        p.unlink(missing_ok=True); p.write_bytes(b)

def rewrite(path, change): # a table through a function, as a new file: DVC may have linked the old one
    df = change(pd.read_parquet(path)); path.unlink(); df.to_parquet(path, index=False)

def test_missing_table(broken):
    "The remedy that the message gives is one."
    (broken/'data'/'filings.parquet').unlink()
    line = fails_with(broken, 'filings.parquet', 'missing', 'git checkout data.dvc && dvc pull --force data.dvc')
    run(broken, 'sh', '-c', re.search(r'`(git checkout.*?)`', line)[1], check=True)
    assert (broken/'data'/'filings.parquet').exists()

def test_truncated_table(broken):
    f = broken/'data'/'registry.parquet'
    b = f.read_bytes(); f.unlink(); f.write_bytes(b[:len(b)//2])
    fails_with(broken, 'registry.parquet', 'damaged or truncated')

def test_missing_column(broken):
    rewrite(broken/'data'/'utilization.parquet', lambda d: d.drop(columns='year'))
    fails_with(broken, 'utilization.parquet', 'year')

def test_unknown_phase(broken):
    def change(d): d.loc[5, 'phase'] = 'PHASE7'; return d
    line = fails_with_after(broken, 'registry', change, 'PHASE7')
    assert 'NCT' in line or 'row' in line

def test_unknown_indication(broken):
    def change(d):
        i = d.index[d.indications.notna()][0]
        d.loc[i, 'indications'] = 'NOTACANCER'; return d
    fails_with_after(broken, 'approvals', change, 'NOTACANCER')

def test_date_after_the_snapshot(broken):
    def change(d): d.loc[7, 'event_date'] = pd.Timestamp('2031-01-01'); return d
    fails_with_after(broken, 'registry', change, '2031-01-01')

def fails_with_after(root, kind, change, *words):
    rewrite(root/'data'/f'{kind}.parquet', change)
    return fails_with(root, f'{kind}.parquet', *words)

def test_too_few_programs_with_trials(broken):
    set_params(broken, **{'data.max_programs': 59})
    def change(d): return d[d.drugs.str.contains('pembrolizumab')].reset_index(drop=True)
    rewrite(broken/'data'/'registry.parquet', change)
    r = run(broken, 'dvc', 'repro', 'episodes')
    line = [l for l in (r.stdout + r.stderr).splitlines() if l.startswith('error in stage')]
    assert r.returncode != 0 and len(line) == 1 and 'max_programs' in line[0], (r.stdout + r.stderr)[-3000:]

def test_typo_in_params(broken):
    f = broken/'params.yaml'
    f.write_text(f.read_text().replace('max_programs', 'max_progams'))
    r = run(broken, 'python', '-m', 'clinical_rl.stages', 'ingest')
    assert r.returncode == 1 and r.stderr.strip().splitlines()[-1].startswith('error in stage ingest: params.yaml') and "'data.max_programs'" in r.stderr

def test_killed_stage_leaves_nothing_half_written(tiny):
    "SIGKILL in the middle of evaluate: the reports stay, and the next run completes."
    run(tiny, 'dvc', 'repro', check=True) # after the tests that broke something: all is as it was
    good = digests(tiny, 'reports')
    env = os.environ | {'PATH': f'{BIN}:{os.environ["PATH"]}', 'PYTHONPATH': str(tiny)}
    env.pop('CLINICAL_RL_ROOT', None)
    p = subprocess.Popen(['dvc', 'repro', '-f', '-s', 'evaluate'], cwd=tiny, env=env, start_new_session=True,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(6)
    os.killpg(p.pid, signal.SIGKILL); p.wait()
    assert digests(tiny, 'reports') == good
    assert not list((tiny/'reports').rglob('*.tmp'))
    run(tiny, 'dvc', 'repro', check=True)
    assert digests(tiny, 'reports') == good
