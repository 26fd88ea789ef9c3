"A tiny copy of the project that a test may run and break."
import os, shutil, subprocess, sys, time
from pathlib import Path

import pytest

# two processes run tests: each on one thread, that does not spin while it waits (read when torch is loaded)
os.environ |= {'OMP_NUM_THREADS': '1', 'OMP_WAIT_POLICY': 'PASSIVE', 'GOMP_SPINCOUNT': '0'}

from clinical_rl import core, gate, records as rec

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

LONG = ['pipeline', 'repeat', 'live', 'full', 'tools', 'probes', 'objectives', 'store', 'agents']

def pytest_collection_modifyitems(items):
    "The longest files first: no process is left alone with one of them in the end. The first two make a whole run each."
    at = {f'test_{name}.py': i for i, name in enumerate(LONG)}
    items.sort(key=lambda i: at.get(i.path.name, len(LONG)))

def until(condition, seconds=600):
    "Wait for an event, however slow the machine is; the limit is for one that never comes."
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(.01)
    return found

def copy_project(to):
    "A git clone of the project with the working tree's changes laid over it and the embedded data pulled."
    subprocess.run(['git', 'clone', '-q', '--no-hardlinks', ROOT, to], check=True)
    changed = subprocess.run(['git', 'ls-files', '-z', '-m', '-o', '--exclude-standard'], cwd=ROOT, capture_output=True, text=True, check=True)
    for f in filter(None, changed.stdout.split('\0')):
        if (ROOT/f).exists():
            (to/f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT/f, to/f)
        else: (to/f).unlink(missing_ok=True)
    if (wheels := ROOT/'.cache'/'wheels').exists(): # spare the network a second download of the base model
        shutil.copytree(wheels, to/'.cache'/'wheels', copy_function=os.link)
    run(to, 'dvc', 'pull', '-q', 'data.dvc', check=True)
    return to

def run(cwd, *cmd, check=False, timeout=3600, **env):
    "Run a command with the copy's own package and this environment's programs; output is text."
    e = os.environ | {'PATH': f'{BIN}:{os.environ["PATH"]}', 'PYTHONPATH': str(cwd), 'HF_HUB_OFFLINE': '1',
                      'TOKENIZERS_PARALLELISM': 'false'} | env
    e.pop('CLINICAL_RL_ROOT', None)
    r = subprocess.run([str(c) for c in cmd], cwd=cwd, env=e, capture_output=True, text=True, timeout=timeout)
    if check and r.returncode: raise AssertionError(f'{cmd} failed:\n{r.stdout[-3000:]}\n{r.stderr[-5000:]}')
    return r

@pytest.fixture(scope='session')
def real_records():
    "The embedded tables, checked and coded as stage ingest does it."
    r = rec.Records.load(ROOT/'data', core.load_params(ROOT/'params.yaml').data.snapshot)
    return gate.prepare(r)
