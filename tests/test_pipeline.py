"The whole DVC graph, from a fresh copy, on a few programs and a few steps: it runs, it reruns what it must, it fails well."
import os, re, signal, subprocess, time

import pandas as pd
import psutil, pytest, yaml

from conftest import BIN, run, until
from tiny import digests, rewrite, set_params, whole_run

def stages_run(out): return re.findall(r"Running stage '([^']+)'", out)

@pytest.fixture(scope='module')
def tiny(tmp_path_factory): return whole_run(tmp_path_factory, 'first')[0]

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
    (tiny/'params.yaml').write_text(before) # the last test makes all as it was

# --- what goes wrong ---------------------------------------------------------------------------------------------------

def fails_with(root, *words, target=('ingest',)):
    "`dvc repro` fails, prints one line with all the words, and the reports of the last good run stay as they were."
    good = digests(root, 'reports')
    r = run(root, 'dvc', 'repro', *target)
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
    fails_with(broken, 'utilization.parquet', 'year', target=('-s', 'ingest'))

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
    return fails_with(root, f'{kind}.parquet', *words, target=('-s', 'ingest'))

def test_too_few_programs_with_trials(broken):
    set_params(broken, **{'data.max_programs': 59})
    def change(d): return d[d.drugs.str.contains('sorafenib')].reset_index(drop=True)
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
    def under_way(): # its kernel has computed for a while
        try: return any('ipykernel' in ' '.join(c.cmdline()) and c.cpu_times().user > 2 for c in psutil.Process(p.pid).children(recursive=True))
        except psutil.NoSuchProcess: return p.poll() is not None
    until(under_way)
    os.killpg(p.pid, signal.SIGKILL); p.wait()
    assert not (tiny/'out'/'notebooks'/'evaluate.ipynb').exists(), 'it was done before it was killed'
    assert digests(tiny, 'reports') == good
    assert not list((tiny/'reports').rglob('*.tmp'))
    run(tiny, 'dvc', 'repro', check=True)
    assert digests(tiny, 'reports') == good
