"A whole run of the DVC graph on few records, a few programs and a few steps, that all processes which run tests share."
import fcntl, hashlib, json, os, shutil

import pandas as pd
import yaml

from conftest import copy_project, run

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
FEW = ['bortezomib', 'carfilzomib', 'gefitinib', 'ipilimumab', 'sorafenib', 'sunitinib'] # programs whose records are kept
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

def rewrite(path, change): # a table through a function, as a new file: DVC may have linked the old one
    df = change(pd.read_parquet(path)); path.unlink(); df.to_parquet(path, index=False)

def keep_few(data):
    "Leave a fifth of the records: what is said of a few programs and their companies, and of whole countries."
    programs = pd.read_csv(data/'programs.csv')
    companies = programs.parent[programs.drug.isin(FEW)]
    few = dict(registry=lambda d: d.drugs.str.contains('|'.join(FEW)), approvals=lambda d: d.drug.isin(FEW), utilization=lambda d: d.drug.isin(FEW),
               filings=lambda d: d.company.isin(companies), epidemiology=lambda d: d.region.isna() & (d.year >= 2000))
    for kind, keep in few.items(): rewrite(data/f'{kind}.parquet', lambda d: d[keep(d)].reset_index(drop=True))

def digests(root, *folders): # path -> sha256 of every file of the folders
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
            for f in folders for p in sorted((root/f).rglob('*')) if p.is_file()}

def whole_run(factory, name):
    "A copy of the project after one whole run, and the digests of what that made; whoever comes second waits for the first."
    shared = factory.getbasetemp() # of one process, below that of all
    home = (shared.parent if 'PYTEST_XDIST_WORKER' in os.environ else shared)/f'whole-{name}'
    home.mkdir(exist_ok=True)
    root, made = home/'project', home/'made.json'
    with open(home/'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(root, ignore_errors=True) # of one that failed
            copy_project(root)
            keep_few(root/'data')
            run(root, 'dvc', 'add', '-q', 'data', check=True)
            run(root, 'git', '-c', 'user.name=test', '-c', 'user.email=test@localhost', 'commit', '-qam', 'Keep few records', check=True)
            set_params(root, **TINY)
            run(root, 'dvc', 'repro', check=True)
            made.write_text(json.dumps(digests(root, *MADE)))
    return root, json.loads(made.read_text())
