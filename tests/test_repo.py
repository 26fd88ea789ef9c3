"The repository's own promises: the package equals the notebooks, stages declare what they read, nothing is heavy."
import ast, json, os, re, subprocess, sys
from pathlib import Path

import pytest, yaml

ROOT = Path(__file__).parent.parent
DVC = yaml.safe_load((ROOT/'dvc.yaml').read_text())['stages']
MODULES = {str(p.relative_to(ROOT/'clinical_rl').with_suffix('')).replace('/', '.'): p
           for p in (ROOT/'clinical_rl').rglob('*.py') if p.stem not in ('__init__', '_modidx')}

def imports(source, module=''): # names of our modules that a piece of source imports; `module` holds it
    out = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('clinical_rl') or \
           isinstance(node, ast.ImportFrom) and node.level:
            above = '.'.join(module.split('.')[:-node.level]) if node.level else ''
            base = f'{above}.{(node.module or "").removeprefix("clinical_rl").strip(".")}'.strip('.')
            out |= {base} if base in MODULES else {f'{base}.{a.name}'.strip('.') for a in node.names}
        elif isinstance(node, ast.Import):
            out |= {a.name.removeprefix('clinical_rl.') for a in node.names if a.name.startswith('clinical_rl.')}
    return out & set(MODULES)

def closure(names):
    todo, seen = set(names), set()
    while todo:
        m = todo.pop()
        if m in seen: continue
        seen.add(m)
        todo |= imports(MODULES[m].read_text(), m)
    return seen

def code(nb): return '\n'.join(''.join(c['source']) for c in json.loads(nb.read_text())['cells'] if c['cell_type'] == 'code')

def notebook_of(stage):
    name = re.search(r'clinical_rl.stages (\w+)', DVC[stage]['cmd'])[1]
    return ROOT/'nbs'/'stages'/f'{name}.ipynb'

@pytest.mark.parametrize('stage', DVC)
def test_stage_declares_every_module_it_imports(stage):
    used = closure(imports(code(notebook_of(stage))))
    declared = {d for d in DVC[stage]['deps']}
    missing = [f'clinical_rl/{m.replace(".", "/")}.py' for m in sorted(used)]
    assert [m for m in missing if m not in declared] == []
    assert str(notebook_of(stage).relative_to(ROOT)) in declared

@pytest.mark.parametrize('stage', DVC)
def test_stage_declares_every_param_group_it_reads(stage):
    src = code(notebook_of(stage))
    groups = set(yaml.safe_load((ROOT/'params.yaml').read_text()))
    used = set(re.findall(r'\b(?:p|params)\.(\w+)', src)) & groups
    declared = {str(x).split('.')[0] for x in DVC[stage].get('params', [])}
    assert used - declared == set()

@pytest.mark.parametrize('stage', DVC)
def test_stage_notebook_is_thin(stage):
    src = code(notebook_of(stage))
    assert not [n for n in ast.walk(ast.parse(src)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))]

def test_no_import_runs_backwards():
    order = [json.loads(p.read_text()) for p in sorted((ROOT/'nbs').glob('[0-9]*.ipynb'))]
    names = [m[1] for nb in order for c in nb['cells'] if (m := re.search(r'#\| default_exp (\S+)', ''.join(c['source'])))]
    rank = {n: i for i, n in enumerate(names)}
    wrong = [(m, i) for m in names for i in imports(MODULES[m].read_text(), m) if i in rank and rank[i] > rank[m]]
    assert wrong == []

def test_library_notebooks_are_readable_in_length():
    long = {p.name: n for p in (ROOT/'nbs').glob('[0-9]*.ipynb') if (n := len(json.loads(p.read_text())['cells'])) > 66}
    assert long == {}

def test_package_equals_notebooks(tmp_path):
    "The drift check: delete what is generated, export again, and nothing may have changed."
    copy = tmp_path/'copy'
    subprocess.run(['git', 'clone', '-q', '--no-hardlinks', ROOT, copy], check=True)
    for f in (copy/'clinical_rl').rglob('*.py'):
        if f.name != '__init__.py': f.unlink()
    env = os.environ | {'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}'}
    env.pop('IN_TEST', None) # set where notebooks are tested in this process; nbdev_export does nothing under it
    subprocess.run('nbdev_export && nbdev_clean', shell=True, cwd=copy, env=env, check=True, capture_output=True)
    dirty = subprocess.run(['git', 'status', '--porcelain', 'clinical_rl', 'nbs'], cwd=copy, capture_output=True, text=True, check=True)
    assert dirty.stdout == ''

def test_git_stays_small():
    rows = subprocess.run(['git', 'ls-tree', '-r', '-l', 'HEAD'], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = {r.split('\t')[1]: int(r.split()[3]) for r in rows if r.split()[3] != '-'}
    assert sum(sizes.values()) < 12e6
    assert {f for f, n in sizes.items() if n > 1e6 and not f.startswith(('reports/', '.dvcstore/'))} == set()

def test_reports_stay_small():
    "Everything in reports/, the full comparison too."
    from clinical_rl.report import MAX_BYTES
    assert sum(p.stat().st_size for p in (ROOT/'reports').rglob('*') if p.is_file()) <= MAX_BYTES

@pytest.mark.parametrize('stage', [s for s, d in DVC.items() if 'matrix' in d])
def test_matrix_stage_takes_its_parameters(stage):
    "Without the tag papermill's values come first and the notebook's own defaults overwrite them."
    tagged = [c for c in json.loads(notebook_of(stage).read_text())['cells'] if 'parameters' in c['metadata'].get('tags', [])]
    assert len(tagged) == 1
    names = {n.id for n in ast.walk(ast.parse(''.join(tagged[0]['source']))) if isinstance(n, ast.Name)}
    assert names == set(DVC[stage]['matrix'])

def test_readme_quotes_the_pipeline(tmp_path):
    "As committed: a run on another machine may differ in a last digit."
    from clinical_rl.report import readme_text
    subprocess.run(['git', 'clone', '-q', ROOT, tmp_path/'copy'], check=True)
    assert readme_text(tmp_path/'copy') == (tmp_path/'copy'/'README.md').read_text(), 'run `make readme` and commit'
