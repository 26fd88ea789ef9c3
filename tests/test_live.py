"A whole refresh over local servers that speak the five APIs: from an empty folder to the tables that the pipeline reads."
import json, multiprocessing, os, random, re, shutil, signal, subprocess, sys, time, zipfile

import pandas as pd
import pytest
import yaml
from conftest import ROOT, copy_project, run, until
from server_kinds import archive, serving
from server_registry import nct, serve, study

from clinical_rl import core, gate, records
from clinical_rl.core import DataError
from clinical_rl.sources import live, store
from clinical_rl.sources.client import Quarantine, one_refresh

KEY = 'invented-key-1234'
DRUGS = ['imatinib', 'ipilimumab', 'nivolumab']

@pytest.fixture(scope='module')
def hosts():
    with serving() as kinds, serve(map(study, range(25))) as registry: yield kinds, registry

@pytest.fixture
def servers(hosts):
    kinds, registry = hosts
    kinds.asked.clear(); kinds.faults.clear(); kinds.tamper.clear()
    return hosts

def ingest(kinds, host, **more): # params.ingest for the local servers
    s = yaml.safe_load((ROOT/'params.yaml').read_text())['ingest'] | dict(source='live', contact='ada@lab.org', programs=DRUGS)
    fast = dict(per_second=1e4, workers=2)
    s['registry'] |= fast | dict(url=host.host, page_size=10)
    s['regulatory'] |= fast | dict(url=f'{kinds.url}/fda'.replace('127.0.0.1', 'localhost'), # a host of its own
                               limit=2, purple_book=f'{kinds.url}/book.csv')
    s['filings'] |= fast | dict(url=f'{kinds.url}/sec', archives=f'{kinds.url}/sec/Archives')
    s['utilization'] |= fast | dict(url=f'{kinds.url}/cms', size=3, datasets=dict(B='uuid-b', D='uuid-d', Medicaid='uuid-m'))
    s['epidemiology'] |= dict(file=f'{kinds.url}/uscs.zip')
    return s | more

def project(where, servers, **more):
    "A folder that is a project for a refresh, with the real programs."
    (where/'data').mkdir(parents=True, exist_ok=True)
    for f in (ROOT/'data').iterdir():
        if not (where/'data'/f.name).exists(): shutil.copy(f, where/'data')
    shutil.copy(ROOT/'settings.ini', where)
    raw = yaml.safe_load((ROOT/'params.yaml').read_text()) | dict(ingest=ingest(*servers, **more))
    (where/'params.yaml').write_text(yaml.safe_dump(raw))
    return where

def contents(folder): # all tables of the store as text, for comparison
    s = store.Store(folder/'live'/'store')
    return {k: s.latest(k).to_csv(index=False) for k in records.KINDS}

def cli(root, *args, **env):
    return run(root, sys.executable, '-m', 'clinical_rl.sources.live', *args, PYTHONPATH=str(ROOT), **env)

@pytest.fixture(scope='module')
def calm(hosts, tmp_path_factory):
    "Project after one undisturbed refresh, and what it says."
    root = project(tmp_path_factory.mktemp('calm'), hosts)
    return root, live.refresh(root)

def test_whole(calm):
    root, out = calm
    assert out['done'] and live.exit_code(out) == 3 and all(k['new'] == k['fetched'] > 0 for k in out['kinds'].values())
    q = Quarantine(root/'live', out['vintage'], ()).records() # three of the invented records are dated in the far future
    assert len(q) == 3 and q.values[0].tolist() == ['regulatory', 'app:nivolumab:FDA:2029-01-01:761901', 'dated 2029-01-01, after the refresh', None, None]
    r, newest = live.tables(root, core.load_params(root/'params.yaml'))
    assert newest['vintage'] == out['vintage'] and live.CONNECTORS.keys() == set(records.KINDS)
    r.save(root/'facts'); r = gate.prepare(records.Records.load(root/'facts', out['vintage'][:10]))
    assert set(r.registry.drugs.str.split('|').explode()) <= set(DRUGS) and r.registry.source.str.startswith('ctgov_v2@').all()
    assert {'EMA', 'FDA'} == set(r.approvals.agency) and {'England', 'United States'} == set(r.epidemiology.country) # carried over

def test_again_and_changed(servers, calm, tmp_path):
    "A second refresh asks the registry for changes only, keeps both versions, and the gate answers with those of the day."
    kinds, registry = servers
    root = project(tmp_path, servers); shutil.copytree(calm[0]/'live', root/'live')
    old, day = registry.studies[0], pd.Timestamp(calm[1]['vintage'][:10])
    registry.studies[0] = study(0, f'{day:%F}', sponsorCollaboratorsModule=dict(leadSponsor=dict(name='Canary Trials', **{'class': 'OTHER'})))
    registry.asked.clear()
    try: out = live.refresh(root, today=(day + pd.Timedelta(days=5)).date())
    finally: registry.studies[0] = old
    assert all('LastUpdatePostDate' in x for x in registry.asked if '/studies?' in x)
    assert {k: (v['new'], v['changed'], v['gone']) for k, v in out['kinds'].items() if k != 'registry'} == dict.fromkeys(list(out['kinds'])[1:], (0, 0, 0))
    assert (out['kinds']['registry']['new'], out['kinds']['registry']['changed']) == (0, 1)
    programs = records.load_programs(root/'data'/'programs.csv')
    both = store.History(store.Store(root/'live'/'store'), programs)
    for later, shown in ((0, False), (4, False), (5, True)):
        seen = gate.as_of(both, day + pd.Timedelta(days=later))
        assert any('Canary' in df.to_csv() for _, df in seen.items()) == shown
    params = core.load_params(root/'params.yaml')
    facts = live.tables(root, params)[0].registry.set_index('nct_id')
    assert 'Canary Trials' not in set(facts.lead_sponsor) # what was known first is what a state may show

def test_other_question_buries_nothing(servers, calm, tmp_path):
    root = project(tmp_path, servers, programs=['imatinib']); shutil.copytree(calm[0]/'live', root/'live')
    out = live.refresh(root)
    assert out['vintage'].endswith('.02') and all(v['gone'] == 0 for v in out['kinds'].values())
    assert contents(root)['registry'].count('NCT') >= contents(calm[0])['registry'].count('NCT')

def test_narrower_questions_bury_nothing(servers, calm, tmp_path):
    "However often, and though the wide one was never finished: what was not asked for is not gone."
    day = pd.Timestamp('2031-03-01') # after all invented dates
    later = lambda n: (day + pd.Timedelta(days=n)).date()
    s = ingest(*servers)['epidemiology'] | dict(file='USCS.zip')
    root = project(tmp_path, servers, epidemiology=s)
    assert not live.refresh(root, today=later(0))['done']
    for n in (1, 2, 3):
        out = live.refresh(project(tmp_path, servers, programs=['imatinib']), today=later(n))
        assert out['done'] and all(v['gone'] == 0 for v in out['kinds'].values()), n
    assert set(store.Store(root/'live'/'store').latest('approvals').drug) == set(DRUGS) - {'ipilimumab'} # which has none
    with pytest.raises(DataError, match='asked for with other'): live.refresh(project(tmp_path, servers), reparse=out['vintage'])
    (root/'live'/'import').mkdir(); (root/'live'/'import'/'USCS.zip').write_bytes(archive())
    out = live.refresh(project(tmp_path, servers, epidemiology=s), today=later(9)) # the wide one is gone on with, dated anew
    assert out['done'] and out['vintage'] == str(later(9)) and str(later(0)) not in set(live.vintages(root/'live').vintage)

def asked_all(registry): # was the registry asked for everything, or for changes only?
    asked = [x for x in registry.asked if '/studies?' in x]
    assert asked and len({'LastUpdatePostDate' in x for x in asked}) == 1
    return 'LastUpdatePostDate' not in asked[0]

def test_each_kind_has_its_own_question(servers, tmp_path):
    "Another file of statistics leaves the other kinds incremental, with tombstones; another query concerns the registry alone."
    kinds, registry = servers
    day, changes = pd.Timestamp('2031-03-01'), [{}, dict(epidemiology=dict(file=f'{kinds.url}/uscs.zip?year=2030'))]
    changes.append(changes[1] | dict(registry=ingest(*servers)['registry'] | dict(query='oncology')))
    seen = []
    for n, change in enumerate(changes):
        registry.asked.clear()
        out = live.refresh(project(tmp_path, servers, **change), today=(day + pd.Timedelta(days=n)).date())
        assert out['done'] and not any(v['gone'] for v in out['kinds'].values())
        complete = store.Store(tmp_path/'live'/'store').changes(out['vintage']).set_index('kind').complete
        seen.append((asked_all(registry), *complete[['registry', 'approvals', 'epidemiology']]))
    assert seen == [(True, True, True, True), (False, False, True, False), (True, False, True, False)]
    registry.asked.clear()
    params = core.load_params(tmp_path/'params.yaml')
    fewer = params.model_copy(update=dict(ingest=params.ingest.model_copy(update=dict(kinds=['registry', 'approvals']))))
    assert live.tables(tmp_path, fewer)[1]['vintage'] == out['vintage'] and not registry.asked # of a vintage that asked for more

def test_vintage_of_an_earlier_version(servers, tmp_path):
    "One digest for all kinds: read, compared with none of today's, and not parsed anew."
    root, day = project(tmp_path, servers), pd.Timestamp('2031-03-01')
    live.refresh(root, today=day.date())
    state = root/'live'/'vintages'/f'{day:%F}.json'
    state.write_text(json.dumps(json.loads(state.read_text()) | dict(asked='0123456789ab')))
    with pytest.raises(DataError, match=r'other programs or settings \(registry, approvals.*or refresh'): live.refresh(root, reparse=f'{day:%F}')
    servers[1].asked.clear()
    out = live.refresh(root, today=(day + pd.Timedelta(days=1)).date())
    assert out['done'] and asked_all(servers[1]) and [v['same'] for v in out['kinds'].values()] == [v['fetched'] for v in out['kinds'].values()]
    kept = store.Store(root/'live'/'store')
    assert not kept.changes(out['vintage']).complete.any() and '2031-03-01 ' in cli(root, '--list').stdout

def test_resumed_on_a_later_day(servers, tmp_path):
    "What came after the interruption was not public before it."
    kinds, registry = servers
    day = pd.Timestamp('2031-03-01'); root = project(tmp_path, servers)
    kinds.faults += [('/fda', 404)]*60
    assert not live.refresh(root, today=day.date())['done']
    kinds.faults.clear()
    old, registry.studies[2] = registry.studies[2], study(2, '2031-03-20', sponsorCollaboratorsModule=dict(leadSponsor=dict(name='Canary Trials')))
    shutil.rmtree(root/'live'/'jobs'/f'{day:%F}'/'registry')
    try: out = live.refresh(root, today=(day + pd.Timedelta(days=5)).date())
    finally: registry.studies[2] = old
    assert out['done'] and out['kinds']['registry']['changed'] == 1
    both = store.History(store.Store(root/'live'/'store'), records.load_programs(root/'data'/'programs.csv'))
    for later, shown in ((0, False), (4, False), (5, True)):
        assert any('Canary' in df.to_csv() for _, df in gate.as_of(both, day + pd.Timedelta(days=later)).items()) == shown, later
    n = len(kinds.asked)
    with pytest.raises(DataError, match='correct the clock'): live.refresh(root, today=day.date())
    assert len(kinds.asked) == n

def test_midnight(servers, tmp_path, monkeypatch):
    root, days = project(tmp_path, servers), iter(pd.date_range('2031-03-01', periods=2))
    class Day(live.date):
        @classmethod
        def today(cls): return next(days, pd.Timestamp('2031-03-02')).date()
    monkeypatch.setattr(live, 'date', Day)
    out = live.refresh(root)
    assert out['vintage'] == '2031-03-01' and all('midnight' in k['error'] for k in out['kinds'].values())
    servers[0].asked.clear()
    assert (again := live.refresh(root))['done'] and again['vintage'] == '2031-03-02' and not servers[0].asked

def test_unfinished_for_long(servers, tmp_path):
    "Pages of a month ago are no news: all is asked anew."
    kinds, registry = servers
    root = project(tmp_path, servers)
    kinds.faults += [('/fda', 404)]*60
    assert not live.refresh(root, today=pd.Timestamp('2031-03-01').date())['done']
    kinds.faults.clear(); kinds.asked.clear(); registry.asked.clear()
    out = live.refresh(root, today=pd.Timestamp('2031-04-01').date())
    assert out['done'] and out['pages'] == '2031-04-01' and any('/studies?' in x for x in registry.asked) and any('/cms' in p for p, *_ in kinds.asked)

def test_reparse_takes_nothing_back(servers, calm, tmp_path, monkeypatch):
    root = project(tmp_path, servers); shutil.copytree(calm[0]/'live', root/'live')
    def broken(*a): raise DataError('no parser')
    monkeypatch.setattr(live.utilization, 'parse', broken)
    out = live.refresh(root, reparse=calm[1]['vintage'])
    assert live.exit_code(out) == 1 and live.vintages(root/'live').done.tolist() == [True]

def test_history(servers, tmp_path):
    "Versions of a trial, one of them of today, beside its page."
    kinds, registry = servers
    day, number = '2031-03-01', nct(study(0))
    people = lambda n, day: study(0, day, designModule=dict(enrollmentInfo=dict(count=n)))
    registry.history = {number: [(d, people(n, d)) for d, n in (('2012-01-01', 900), ('2015-06-01', 500), (day, 20))]}
    try: out = live.refresh(project(tmp_path, servers, registry=ingest(*servers)['registry'] | dict(history='all')), today=pd.Timestamp(day).date())
    finally: registry.history = {}
    assert out['done'], out['kinds']['registry']
    kept = store.Store(tmp_path/'live'/'store')
    seen = {t: kept.as_of('registry', t).set_index('nct_id').loc[number] for t in ('2014-01-01', '2016-01-01', day)}
    assert [(r.enrollment, r.exact) for r in seen.values()] == [(900, True), (500, True), (20, True)]

def test_set_aside_until_it_can_be_read(servers, tmp_path, monkeypatch):
    "A later refresh asks for changes only; a record that could not be read stays in sight, and a better parser takes it in."
    kinds, registry = servers
    root, days = project(tmp_path, servers), [d.date() for d in pd.date_range('2031-03-01', periods=3)]
    registry.studies += [study(700, designModule=dict(phases=['PHASE5'])), study(701, identificationModule=dict(nctId=7))] # one has no number
    try: outs = [live.refresh(root, today=d) for d in days[:2]]
    finally: del registry.studies[-2:]
    assert [o['kinds']['registry']['quarantined'] for o in outs] == [2, 2] and live.exit_code(outs[1]) == 3
    monkeypatch.setitem(live.registry_v2._PHASE, ('PHASE5',), 'PHASE4')
    out = live.refresh(root, today=days[2])['kinds']['registry']
    assert (out['new'], out['quarantined']) == (1, 1)

def test_short_answer_buries_nothing(servers, calm, tmp_path):
    kinds, _ = servers
    root = project(tmp_path, servers); shutil.copytree(calm[0]/'live', root/'live')
    kinds.tamper['/fda'] = lambda obj, q: obj | dict(results=obj['results'][:-1]) if isinstance(obj, dict) and 'results' in obj else obj
    out = live.refresh(root)
    said = out['kinds']['approvals']
    assert said['short'] > 0 and said['gone'] == 0 and live.exit_code(out) == 3
    assert contents(root)['approvals'] == contents(calm[0])['approvals']

def test_file_put_in_again(servers, tmp_path):
    "A wrong archive under the right name is not kept for good."
    s = ingest(*servers)['epidemiology'] | dict(file='USCS.zip')
    root = project(tmp_path, servers, epidemiology=s)
    (root/'live'/'import').mkdir(parents=True)
    with zipfile.ZipFile(root/'live'/'import'/'USCS.zip', 'w') as z: z.writestr('READ.ME', 'nothing')
    assert 'error' in live.refresh(root)['kinds']['epidemiology']
    (root/'live'/'import'/'USCS.zip').write_bytes(archive())
    assert live.refresh(root)['done']

def test_file_is_read_once(servers, tmp_path):
    "A refresh that is gone on with does not ask again for a file that it has read."
    kinds, _ = servers
    root = project(tmp_path, servers, epidemiology=dict(file='USCS.zip'))
    (file := root/'live'/'import'/'USCS.zip').parent.mkdir(parents=True)
    file.write_bytes(archive())
    kinds.faults += [('/fda', 404)]*60
    assert not live.refresh(root)['done']
    kinds.faults.clear(); file.unlink()
    out = live.refresh(root)
    assert out['done'] and out['kinds']['epidemiology']['fetched'] == 16

def test_pipeline_reads_a_finished_vintage_only(servers, tmp_path):
    kinds, registry = servers
    day = pd.Timestamp('2031-03-01'); root = project(tmp_path, servers)
    first = live.refresh(root, today=day.date())
    kinds.faults += [('/sec', 404)]*60
    registry.studies.append(study(700, '2031-03-08', statusModule=dict(overallStatus='RECRUITING', startDateStruct=dict(date='2031-03'),
        studyFirstPostDateStruct=dict(date='2031-03-08'), lastUpdatePostDateStruct=dict(date='2031-03-08'))))
    try: assert not live.refresh(root, today=(day + pd.Timedelta(days=9)).date())['done']
    finally: registry.studies.pop(); kinds.faults.clear()
    r, out = live.tables(root, core.load_params(root/'params.yaml'))
    assert first['done'] and out['vintage'] == first['vintage'] and r.registry.event_date.max() <= day

def test_filed_in_the_future(servers, tmp_path):
    kinds, _ = servers
    def later(obj, q):
        recent = obj['filings']['recent'] if 'filings' in obj else obj
        recent['filingDate'][0] = '2099-05-20'
        return obj
    kinds.tamper['/submissions/CIK0000014272.json'] = later
    root = project(tmp_path, servers)
    out = live.refresh(root, today=pd.Timestamp('2031-03-01').date())
    q = Quarantine(root/'live', out['vintage'], ()).records()
    assert q.source.tolist() == ['filings'] and q.reason[0] == 'dated 2099-05-20, after the refresh'

def test_trial_of_the_future(servers, tmp_path):
    "Set aside once, with all its versions."
    _, registry = servers
    late = study(700, '2031-03-20', statusModule=dict(studyFirstPostDateStruct=dict(date='2031-03-20')))
    late['protocolSection']['identificationModule']['briefTitle'] = 'Nivolumab and what comes'
    registry.studies.append(late)
    registry.history = {nct(late): [(d, late) for d in ('2031-01-01', '2031-02-01')]}
    s = ingest(*servers)['registry'] | dict(history='all')
    try: out = live.refresh(project(tmp_path, servers, registry=s), today=pd.Timestamp('2031-03-01').date())
    finally: registry.studies.pop(); registry.history = {}
    q = Quarantine(tmp_path/'live', out['vintage'], ()).records()
    assert q[['record', 'reason']].values.tolist() == [[f'reg:{nct(late)}', 'dated 2031-03-20, after the refresh']]
    assert nct(late) not in set(store.Store(tmp_path/'live'/'store').latest('registry').nct_id)

def test_a_bug_in_one_connector(servers, tmp_path, monkeypatch):
    "The other kinds go on, the run says where it broke."
    monkeypatch.setattr(live.regulatory, 'parse', lambda *a: {}['nothing'])
    out = live.refresh(project(tmp_path, servers))
    assert 'KeyError' in out['kinds']['approvals']['error'] and live.exit_code(out) == 1
    assert all('error' not in v for k, v in out['kinds'].items() if k != 'approvals')

@pytest.mark.parametrize('text', ['', '{', 'null', '[]', '{}', '{"vintage": 5}', '{"vintage": "x", "asked": "a", "done": true, "kinds": {}}'])
def test_damaged_vintage(text, servers, tmp_path):
    root = project(tmp_path, servers)
    (root/'live'/'vintages').mkdir(parents=True); (root/'live'/'vintages'/'2026-01-01.json').write_text(text)
    with pytest.raises(DataError, match=r'2026-01-01\.json is .*delete it'): live.refresh(root)

def test_folder_that_cannot_be(servers, tmp_path):
    r = cli(project(tmp_path, servers, folder=str(tmp_path/'params.yaml')))
    assert r.returncode == 1 and len(r.stderr.splitlines()) == 1 and 'ingest.folder' in r.stderr
    for folder in ('', 'data', 'out/facts', '../live'):
        with pytest.raises(core.ParamError, match='ingest.folder'): core.load_params(project(tmp_path, servers, folder=folder)/'params.yaml')

def test_a_kind_that_fails(servers, tmp_path, capsys):
    "The others are kept; the next run asks only for what is missing, in the same vintage."
    kinds, registry = servers
    s = ingest(*servers)['epidemiology'] | dict(file='USCS.zip')
    root = project(tmp_path, servers, epidemiology=s)
    assert live.main(['--root', str(root)]) == 1
    said = capsys.readouterr().err
    assert 'live/import/USCS.zip is missing' in said and 'ingest.epidemiology.file' in said
    with pytest.raises(DataError, match='not complete.*USCS.zip'): live.tables(root, core.load_params(root/'params.yaml'))
    (root/'live'/'import').mkdir(); (root/'live'/'import'/'USCS.zip').write_bytes(archive())
    kinds.asked.clear(); registry.asked.clear()
    out = live.refresh(root)
    assert out['done'] and not kinds.asked and not registry.asked and len(live.vintages(root/'live')) == 1

DAY = pd.Timestamp('2031-03-01').date() # after all invented dates

def made(root): # all that a refresh leaves but its journals, which hold times: path -> bytes
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted((root/'live').rglob('*'))
            if p.is_file() and p.name not in ('lock', '.lock') and 'jobs' not in p.parts}

def test_killed_and_gone_on_with(servers, tmp_path):
    "Kill -9 at 20 random points of a whole refresh, one after the other; whenever one gets to its end, all is as if nothing had been."
    small = dict(programs=['imatinib', 'nivolumab'])
    calm, start = project(tmp_path/'calm', servers, **small), time.time()
    live.refresh(calm, today=DAY)
    took, rng, killed, done, root = time.time() - start, random.Random(1), 0, 0, project(tmp_path/'0', servers, **small)
    while killed < 20:
        p, start = multiprocessing.get_context('fork').Process(target=live.refresh, args=(root,), kwargs=dict(today=DAY)), time.time()
        p.start(); p.join(took*rng.uniform(.02, 1)); p.kill(); p.join()
        assert p.exitcode in (0, -signal.SIGKILL)
        killed += p.exitcode != 0
        if p.exitcode == 0: took = min(took, time.time() - start) # or a first run that was slow would have all others end
        if (ended := live.vintages(root/'live').done.any()) or p.exitcode == 0: # it may be killed between the last write and its exit
            assert ended and made(root) == made(calm)
            root = project(tmp_path/str(done := done + 1), servers, **small)
    assert live.refresh(root, today=DAY)['done'] and made(root) == made(calm)

FULL = ''' # in a namespace of its own: a disk of so many pages, a refresh until it is full, a larger disk, the refresh again
import json, subprocess, sys
from pathlib import Path
from test_live import DAY, live, made, project, store
from clinical_rl.core import DataError
root, out, pages = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
def mount(*options):
    if subprocess.run(['mount', *options, root/'live'], capture_output=True).returncode: sys.exit(77)
mount('-t', 'tmpfs', '-o', f'size={4096*pages}', 'tmpfs')
try: said = [v['error'] for v in live.refresh(root, today=DAY)['kinds'].values() if 'error' in v]
except DataError as e: said = [str(e)]
half = [p.name for p in (root/'live').rglob('*.tmp')]
store.Store(root/'live'/'store').check()
mount('-o', 'remount,size=64m')
done = live.refresh(root, today=DAY)['done']
for name, body in made(root).items():
    (out/name).parent.mkdir(parents=True, exist_ok=True); (out/name).write_bytes(body)
print(json.dumps(dict(said=said, half=half, done=done)))
'''

@pytest.mark.parametrize('share', [.1, .6, .97])
def test_full_disk(share, servers, tmp_path):
    "A real one: one line an error, with the file and the remedy; nothing half-written; with more space it goes on to the same end."
    calm = project(tmp_path/'calm', servers, programs=['imatinib', 'nivolumab'])
    live.refresh(calm, today=DAY)
    need = sum(-(-p.stat().st_size//4096) for p in (calm/'live').rglob('*') if p.is_file())
    root, saved = project(tmp_path/'full', servers, programs=['imatinib', 'nivolumab']), tmp_path/'saved'
    (root/'live').mkdir()
    env = dict(PYTHONPATH=f'{ROOT}:{ROOT/"tests"}')
    try: r = run(root, 'unshare', '--map-root-user', '--mount', sys.executable, '-c', FULL, root, saved, int(share*need), **env)
    except FileNotFoundError: pytest.skip('no unshare here')
    if 'unshare' in r.stderr or r.returncode == 77: pytest.skip('no disk can be mounted here')
    assert r.returncode == 0, r.stderr[-3000:]
    out = json.loads(r.stdout.splitlines()[-1])
    assert out['said'] and not out['half'] and out['done']
    for line in out['said']: assert re.search(r'cannot write /.*/live/\S+: No space left on device; free some space', line) and '\n' not in line
    assert made(calm) == {f'live/{p.relative_to(saved/"live")}': p.read_bytes() for p in sorted(saved.rglob('*')) if p.is_file()}

def test_two_at_once(servers, calm, tmp_path):
    root = project(tmp_path, servers); shutil.copytree(calm[0]/'live', root/'live')
    with one_refresh(root/'live'):
        r = cli(root)
        assert r.returncode == 1 and str(os.getpid()) in r.stderr and len(r.stderr.splitlines()) == 1
        p = subprocess.Popen([sys.executable, '-m', 'clinical_rl.sources.live', '--wait', '--root', str(root)], cwd=root, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, env=os.environ | dict(PYTHONPATH=str(ROOT)))
        assert f'waiting for process {os.getpid()}' in p.stderr.readline() and p.poll() is None
    said, _ = p.communicate(timeout=900)
    assert p.returncode == 3 and 'Vintage' in said

def test_no_contact_no_request(servers, tmp_path):
    kinds, registry = servers; registry.asked.clear()
    r = cli(project(tmp_path, servers, contact=' '))
    assert r.returncode == 1 and 'ingest.contact' in r.stderr and len(r.stderr.splitlines()) == 1
    assert not kinds.asked and not registry.asked and not (tmp_path/'live'/'vintages').exists()

def test_key_is_nowhere(servers, tmp_path):
    kinds, _ = servers
    root = project(tmp_path, servers)
    kinds.faults.append(('/fda', 500))
    r = cli(root, OPENFDA_API_KEY=KEY)
    assert r.returncode == 3 and any('Authorization' in h for p, _, h in kinds.asked if p == '/fda')
    assert not any('Authorization' in h for p, _, h in kinds.asked if p != '/fda')
    found = [p for p in root.rglob('*') if p.is_file() and 'data' not in p.parts and KEY.encode() in p.read_bytes()]
    pages = [live.client.Pages(root/'live', v) for v in live.vintages(root/'live').vintage]
    bodies = [b for p in pages for s in ('regulatory', 'registry') for j in p.jobs(s) for _, b in p.job(s, j).bodies(partial=True)]
    assert bodies and not found and KEY not in r.stdout + r.stderr and not any(KEY.encode() in b for b in bodies)

def test_command_line(servers, calm, tmp_path):
    root = project(tmp_path, servers); shutil.copytree(calm[0]/'live', root/'live')
    servers[0].asked.clear()
    r = cli(root, '--reparse', calm[1]['vintage'])
    assert r.returncode == 3 and not servers[0].asked and '3 records could not be parsed (approvals 3)' in r.stderr
    assert calm[1]['vintage'] in cli(root, '--list').stdout
    r = cli(root, '--reparse', '2001-01-01')
    assert r.returncode == 1 and 'no vintage 2001-01-01' in r.stderr

def test_a_root_that_is_named_wins(servers, calm, tmp_path, monkeypatch, capsys):
    "Over the one of the environment, and for what DVC starts."
    root = project(tmp_path/'p', servers); shutil.copytree(calm[0]/'live', root/'live'); (root/'dvc.yaml').touch()
    elsewhere = project(tmp_path/'elsewhere', servers)
    monkeypatch.setenv('CLINICAL_RL_ROOT', str(elsewhere))
    assert live.main(['--root', str(root), '--list']) == 0 and calm[1]['vintage'] in capsys.readouterr().out
    started = []
    monkeypatch.setattr(live.subprocess, 'run', lambda cmd, cwd, env: started.append((cwd, env['CLINICAL_RL_ROOT'])) or subprocess.CompletedProcess(cmd, 0))
    assert live.main(['--root', str(root), '--reparse', calm[1]['vintage']]) == 3
    assert started == [(root, str(root))] and not (elsewhere/'live').exists()

def test_pipeline_reads_it(servers, tmp_path):
    """ingest.source: live and `dvc repro`: the store is filled, the next stages read it, and a second repro does nothing.
    Back to the embedded tables: they are there again, and live's are gone."""
    root = copy_project(tmp_path/'p')
    labels = pd.read_csv(root/'data'/'labels.csv', dtype=str)
    few = core.read_parquet(root/'data'/'registry.parquet').query('nct_id in @labels.nct_id')
    core.write_parquet(few, root/'data'/'registry.parquet')
    def repro(**ingest):
        raw = yaml.safe_load((root/'params.yaml').read_text())
        (root/'params.yaml').write_text(yaml.safe_dump(raw | dict(ingest=raw['ingest'] | ingest)))
        r = run(root, 'dvc', 'repro', 'ingest', OPENFDA_API_KEY=KEY)
        assert r.returncode == 0, r.stdout[-2000:] + r.stderr[-2000:]
        return r
    r = repro(**ingest(*servers, programs='all'))
    holds = [p for top in ('.dvc', 'out', 'live', 'dvc.lock') for p in [root/top, *(root/top).rglob('*')] if p.is_file() and KEY.encode() in p.read_bytes()]
    assert not holds and KEY not in r.stdout + r.stderr
    df = core.read_parquet(root/'out/records/registry.parquet')
    assert df.source.str.startswith('ctgov_v2@').all() and df.usable.any()
    assert (root/'live'/'store').exists() and run(root, 'git', 'status', '--porcelain', 'live').stdout == ''
    servers[0].asked.clear()
    assert 'Running stage' not in repro().stdout and not servers[0].asked
    repro(source='embedded')
    assert [p.name for p in (root/'out/facts').iterdir()] == ['origin.json']
    want = gate.prepare(records.Records.load(root/'data', core.load_params(root/'params.yaml').data.snapshot))
    for kind, df in want.items():
        pd.testing.assert_frame_equal(core.read_parquet(root/'out/records'/f'{kind}.parquet'), records.validate(df, kind, 'here'))
