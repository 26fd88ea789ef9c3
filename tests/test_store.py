"The point-in-time store under faults: killed, out of space, damaged, two at once; and against a plain reference."
import json, shutil, subprocess, sys, textwrap
from pathlib import Path

import pandas as pd, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from clinical_rl import gate
from clinical_rl.core import DataError
from clinical_rl.records import KINDS, VALUES, example
from clinical_rl.sources.store import GONE, History, Store, stored

ROOT = Path(__file__).parent.parent
DAY = [pd.Timestamp('2020-01-01') + pd.Timedelta(days=30 * i) for i in range(12)]
NAMES = ('nivolumab', 'imatinib')
ROW = example().registry.drop(columns='public_date').iloc[0].to_dict()

def trials(ids, title='a title', drugs='nivolumab', **values):
    "Rows of the registry by number."
    return pd.DataFrame([ROW | dict(record_id=f'reg:{i}', nct_id=f'NCT{i:08d}', title=f'{title} {i}', drugs=drugs) | values
                         for i in ids])

def files(store): return {str(p.relative_to(store.folder)) for p in store.folder.rglob('*') if p.is_file() and p.name != '.lock'}

def listed(store):
    manifests = list(store.folder.rglob('_manifest.json'))
    parts = [m.parent/f['name'] for m in manifests for f in json.loads(m.read_text())['parts']]
    return {str(p.relative_to(store.folder)) for p in manifests + parts}

# --- a source that changes, and what it says when it is read

CONTENT = st.tuples(st.sampled_from('xyz'), st.sampled_from((None, 'nivolumab', 'imatinib', 'imatinib|nivolumab')))
RECORD = st.fixed_dictionaries(dict(
    public=st.integers(0, 11),                                                    # day of its registration
    truth=st.lists(st.one_of(st.none(), CONTENT), min_size=12, max_size=12),      # content on each day; None: not there
    history=st.sets(st.integers(0, 11), max_size=2)))                             # days on which the source gives its whole past
REFRESH = st.tuples(st.integers(0, 11), st.booleans())                            # day, complete

def refreshes(world, plan):
    "(day, complete, rows (record, day that a version began or None, content)) of each refresh; an incremental one brings some."
    for day, complete in sorted(dict(plan).items()):
        rows = []
        for i, r in enumerate(world):
            always = None not in r['truth']
            if always and day in r['history']:
                rows += [(i, d, r['truth'][d]) for d in range(day + 1) if d == 0 or r['truth'][d] != r['truth'][d - 1]]
            elif r['truth'][day] is not None and (complete or (i + day) % 2): rows.append((i, None, r['truth'][day]))
        if rows: yield day, complete, rows

def told(world, plan): # record -> (day, number of the refresh, content) of every row of every refresh
    events = {}
    for n, (day, complete, rows) in enumerate(refreshes(world, plan)):
        for i, begun, content in rows: events.setdefault(i, []).append((day if begun is None else begun, n, content))
        for i in set(events) - {i for i, _, _ in rows} if complete else ():
            events[i].append((day, n, None))
    return events

def reference(world, plan, t):
    "By record the newest up to t, else the first if it was public."
    out = {}
    for i, es in told(world, plan).items():
        past, ahead = [e for e in es if e[0] <= t], [e for e in es if e[0] > t]
        if past: content, exact = max(past, key=lambda e: e[:2])[2], True
        else: content, exact = min(ahead, key=lambda e: (e[0], -e[1]))[2], False
        if content and (exact or world[i]['public'] <= t): out[f'reg:{i}'] = (*content, exact)
    return out

@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(world=st.lists(RECORD, min_size=1, max_size=5), plan=st.lists(REFRESH, min_size=1, max_size=4), t=st.integers(0, 11))
def test_equals_a_plain_reference(tmp_path_factory, world, plan, t):
    s = Store(tmp_path_factory.mktemp('store'), threads=1)
    for day, complete, rows in refreshes(world, plan):
        table = pd.concat([trials([i], drugs=content[1], event_date=DAY[world[i]['public']]).assign(
            title=content[0], valid_from=DAY[begun] if begun is not None else pd.NaT) for i, begun, content in rows])
        table = table.astype({'drugs': 'str', 'valid_from': 'datetime64[us]'})
        for _ in range(2): s.add('registry', f'{DAY[day]:%F}', table, complete)
    want = reference(world, plan, t)
    got = s.as_of('registry', DAY[t])
    text = lambda x: None if pd.isna(x) else x
    assert {r.record_id: (r.title, text(r.drugs), r.exact) for r in got.itertuples()} == want
    for name in NAMES:
        of = s.as_of('registry', DAY[t], name)
        assert {r.record_id: (r.title, r.drugs, r.exact) for r in of.itertuples()} == {
            k: v for k, v in want.items() if v[1] and name in v[1].split('|')}
    flat = s._flat('registry', NAMES, '9999-12-31').to_pandas() # what `export` gives of one kind
    first = {i: min(es, key=lambda e: (e[0], -e[1]))[2] for i, es in told(world, plan).items()}
    assert {r.record_id: (r.title, r.drugs) for r in flat.itertuples()} == {f'reg:{i}': c for i, c in first.items() if c[1]}
    s.close()

# --- the gate

def test_a_later_version_never_shows_before_its_day(tmp_path):
    "Canaries in every text column of every kind, in a later refresh, on dates up to the day before."
    r, s = example(), Store(tmp_path/'s')
    for kind, df in r.items():
        s.add(kind, '2021-12-31', df)
        free = [c for c, t in stored(kind).items() if t == 'VARCHAR' and (kind, c) not in VALUES
                and c not in ('record_id', 'kind', 'date_basis', 'drug', 'drugs')]
        s.add(kind, '2023-05-01', df.assign(**{c: 'CANARY' for c in free}))
    history = History(s, r.programs)
    shown = lambda t: '\n'.join(df.to_csv() for _, df in gate.as_of(history, t).items())
    for t in pd.date_range('2012-01-01', '2023-04-30', periods=6): assert 'canary' not in shown(t).lower()
    assert shown('2023-05-01').lower().count('canary') > 8

# --- faults

RUN = '''
import os, resource, signal, sys
from pathlib import Path
import pyarrow.parquet as pq
sys.path.insert(0, {tests!r})
from test_store import Store, trials, pd
from clinical_rl.core import DataError
folder, base = Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None
NEW = pd.concat([trials(range(5, 200), 'new'), trials(range(300, 500), 'new', None)])
'''

def script(text, *args, wait=True):
    code = RUN.format(tests=str(ROOT/'tests')) + textwrap.dedent(text)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    p = subprocess.Popen([sys.executable, '-c', code, *map(str, args)], cwd=ROOT, **pipes)
    if not wait: return p
    out, err = p.communicate(timeout=900)
    assert p.returncode == 0, err[-3000:]
    return out

@pytest.fixture
def base(tmp_path):
    s = Store(tmp_path/'base', threads=1)
    s.add('registry', '2020-01-01', pd.concat([trials(range(200)), trials(range(200, 400), drugs=None).astype({'drugs': 'str'})]))
    yield s
    s.close()

def test_killed_anywhere_nothing_is_lost(base, tmp_path):
    "Kill -9 before the k-th thing that an add does to the disk, for every k; then look, add again, and compare."
    out = script('''
    import shutil
    def killer(k):
        "Wrap what touches the disk, and die at the k-th call."
        left = [k]
        def wrap(owner, name):
            f = getattr(owner, name)
            def g(*a, **kw):
                left[0] -= 1
                if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
                return f(*a, **kw)
            setattr(owner, name, g)
        for owner, name in ((os, 'replace'), (os, 'fsync'), (Path, 'mkdir'), (Path, 'write_text'), (pq.ParquetWriter, '__init__'),
                            (pq.ParquetWriter, 'write_table'), (pq.ParquetWriter, 'close')): wrap(owner, name)
    def child(work):
        sys.stdout.flush()
        if pid := os.fork(): return os.waitpid(pid, 0)[1]
        try: work(); os._exit(0)
        except BaseException: __import__('traceback').print_exc(); os._exit(1)
    def state(s): return s.sql('SELECT record_id, title, valid_from, hash FROM registry ORDER BY ALL').to_csv()
    def look(before, after):
        s = Store(folder, threads=1)
        s.check()
        assert state(s) in (before, after), 'neither before nor after'
        s.add('registry', '2020-02-01', NEW)
        assert state(s) == after
        import test_store
        assert test_store.files(s) == test_store.listed(s), test_store.files(s) ^ test_store.listed(s)
    def undisturbed():
        s = Store(base, threads=1); (base.parent/'before').write_text(state(s))
        shutil.copytree(base, base.parent/'after'); s = Store(base.parent/'after', threads=1)
        s.add('registry', '2020-02-01', NEW); (base.parent/'after.txt').write_text(state(s))
    assert child(undisturbed) == 0
    before, after = (base.parent/'before').read_text(), (base.parent/'after.txt').read_text()
    k, died = 0, True
    while died:
        k += 1
        shutil.rmtree(folder, ignore_errors=True); shutil.copytree(base, folder)
        def add(): killer(k); Store(folder, threads=1).add('registry', '2020-02-01', NEW)
        status = child(add)
        assert status in (0, 9), status
        died = status == 9
        assert child(lambda: look(before, after)) == 0, k
    print(k - 1)
    ''', tmp_path/'work', base.folder)
    assert int(out.split()[-1]) >= 12 # points at which it was killed

def test_two_processes_at_once(base):
    "One waits for the other, and the refresh is in once."
    ps = [script("print(Store(folder, threads=1).add('registry', '2020-02-01', NEW))", base.folder, wait=False) for _ in range(2)]
    said = [p.communicate(timeout=900) for p in ps]
    assert [p.returncode for p in ps] == [0, 0], said
    assert said[0][0] == said[1][0] == "{'new': 100, 'changed': 295, 'gone': 105, 'same': 0}\n"
    assert len(base.latest('registry')) == 395 # an open store sees it
    assert base.vintages().vintage.tolist() == ['2020-01-01', '2020-02-01']
    assert files(base) == listed(base)

def test_full_disk_is_one_line_and_changes_nothing(base):
    before, was = base.latest('registry').to_csv(), files(base)
    out = script('''
    s = Store(folder, threads=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)) # stands for a full disk: writing fails in the middle of a file
    try: s.add('registry', '2020-02-01', NEW)
    except DataError as e: print(e)
    ''', base.folder)
    assert out.count('\n') == 1 and 'cannot write' in out and 'free some space' in out
    assert base.latest('registry').to_csv() == before and files(base) == was

@pytest.mark.parametrize('layout', ['table', 'index'])
def test_damage_is_named(base, layout):
    path = next(base.folder.glob(f'registry/*/layout={layout}/*.parquet'))
    whole = path.read_bytes()
    ask = lambda: Store(base.folder).as_of('registry', '2020-06-01', 'nivolumab')
    def fails(do):
        with pytest.raises(DataError) as e: do()
        assert str(path) in str(e.value) and 'delete' in str(e.value) and '\n' not in str(e.value)
    path.write_bytes(whole[:-30]); fails(ask)
    path.unlink(); fails(ask)
    path.write_bytes(whole[:len(whole) // 3] + bytes(len(whole) - len(whole) // 3)); fails(ask)
    flipped = bytearray(whole); flipped[len(whole) // 2] ^= 1
    path.write_bytes(flipped); fails(Store(base.folder).check)
    path.write_bytes(whole); assert len(ask()) == 200

def test_damaged_manifest_is_named(base):
    path = next(base.folder.rglob('_manifest.json'))
    path.write_text(path.read_text()[:40])
    with pytest.raises(DataError, match='_manifest.json is damaged'): Store(base.folder).latest('registry')

def test_a_stray_folder_is_not_there_and_is_swept(base):
    stray = base.folder/'registry'/'refresh=2020-01-15'/'layout=table'
    shutil.copytree(next(base.folder.rglob('layout=table')), stray)
    assert len(Store(base.folder).latest('registry')) == 400
    base.add('registry', '2020-02-01', trials([1], 'new'), complete=False)
    assert not stray.parent.exists() and files(base) == listed(base)

@pytest.mark.parametrize('bad, says', [
    (lambda s: s.add('registry', '2019-01-01', trials([1])), 'comes before 2020-01-01'),
    (lambda s: s.add('registry', 'newest', trials([1])), 'does not begin with a day'),
    (lambda s: s.add('registry', '2020-02-01', trials([1, 1])), 'reg:1 occurs twice'),
    (lambda s: s.add('registry', '2020-02-01', trials([1]).drop(columns='title')), "column 'title' is missing"),
    (lambda s: s.add('registry', '2020-02-01', trials([1]).assign(extra=1)), "column 'extra' is not declared"),
    (lambda s: s.add('registry', '2020-02-01', trials([1]).assign(event_date='yesterday')), 'yesterday'),
    (lambda s: s.add('registry', '2020-02-01', trials([1]).assign(record_id='')), 'have no record_id'),
    (lambda s: s.add('registry', '2020-02-01', trials([1]).iloc[:0]), 'mark every record as gone'),
])
def test_refused_in_one_line_and_nothing_changes(base, bad, says):
    was = files(base)
    with pytest.raises(DataError) as e: bad(base)
    assert says in str(e.value) and '\n' not in str(e.value)
    assert files(base) == was and len(base.latest('registry')) == 400

def test_a_refresh_with_other_content_replaces_itself_until_a_later_one_builds_on_it(base):
    base.add('registry', '2020-02-01', trials(range(10), 'wrong'), complete=False)
    assert base.add('registry', '2020-02-01', trials(range(5), 'right'), complete=False) == dict(new=0, changed=5, same=0, gone=0)
    assert base.latest('registry').title.str.contains('wrong').sum() == 0 and files(base) == listed(base)
    base.add('registry', '2020-03-01', trials(range(5), 'later'), complete=False)
    with pytest.raises(DataError, match='2020-03-01 builds on it'):
        base.add('registry', '2020-02-01', trials([7]), complete=False)
    was = files(base)
    assert base.add('registry', '2020-02-01', trials(range(5), 'right'), complete=False)['changed'] == 5 # as it was
    assert files(base) == was

def test_only_changes_are_written(base):
    n = lambda: base.sql('SELECT count(*) AS n FROM registry').n[0]
    same = base.latest('registry').drop(columns=['public_date', 'valid_from', 'exact'])
    again = same.assign(source='read@2020-02-01', vintage='2020-02-01')
    assert base.add('registry', '2020-02-01', again) == dict(new=0, changed=0, same=400, gone=0)
    assert n() == 400
    assert base.add('registry', '2020-03-01', same.iloc[:399]) == dict(new=0, changed=0, same=399, gone=1)
    assert base.add('registry', '2020-04-01', same) == dict(new=1, changed=0, same=399, gone=0) # it is back
    assert n() == 402 and base.sql(f"SELECT count(*) AS n FROM registry WHERE hash = '{GONE}'").n[0] == 1
    assert [len(base.as_of('registry', t)) for t in ('2020-02-29', '2020-03-01', '2020-04-01')] == [400, 399, 400]

def test_kinds_without_programs(tmp_path):
    s = Store(tmp_path/'s')
    for kind, df in example().items(): s.add(kind, '2021-12-31', df)
    assert [len(s.latest(k)) for k in KINDS] == [1] * 5
    assert not list((s.folder/'epidemiology').rglob('layout=index')) and list((s.folder/'utilization').rglob('layout=index'))
