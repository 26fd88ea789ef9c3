"""The live registry against a local one that speaks its API: whatever happens on the way, the table is the same"""
import gzip, json, multiprocessing, random, signal, time
from types import SimpleNamespace as NS

import pandas as pd
import pytest
from conftest import ROOT, until
from server_registry import client, fetch, nct, serve, study

from clinical_rl import gate, records
from clinical_rl.core import DataError
from clinical_rl.sources import registry_v2 as v2
from clinical_rl.sources.client import HttpError, Pages, Quarantine

BMS = 'Bristol-Myers Squibb'
PROGRAMS = pd.DataFrame([
    ('nivolumab', 'Opdivo', 'BMS-936558|ONO-4538', 'monoclonal antibody', 'PD-1', 'PD-1/PD-L1 inhibitor', BMS, BMS),
    ('ipilimumab', 'Yervoy', 'MDX-010', 'monoclonal antibody', 'CTLA-4', 'CTLA-4 inhibitor', BMS, BMS),
    ('imatinib', 'Gleevec', 'STI571|Glivec', 'small molecule', 'BCR-ABL', 'BCR-ABL inhibitor', 'Novartis', 'Novartis')],
    columns=['drug', 'brand', 'synonyms', 'modality', 'target', 'drug_class', 'parent', 'sponsors']).astype('str')
DAY = '2025-08-29'

def asking(server, **more): # params of a fetch
    return NS(**dict(url=server.host, query='all', page_size=10, since=None, history='none', workers=1) | more)

def get(server, folder, vintage=DAY, **ask):
    "Fetch and parse all; returns pages, table and quarantine."
    with client() as c: v2.fetch(c, pages := Pages(folder, vintage), PROGRAMS, asking(server, **ask))
    q = Quarantine(folder, vintage)
    return pages, v2.parse(pages, PROGRAMS, q, named_only=False), q

@pytest.fixture(scope='module')
def calm(tmp_path_factory): # what an undisturbed run gives for 55 studies
    with serve(map(study, range(55))) as s: return get(s, tmp_path_factory.mktemp('calm'))[1]

def same(a, b): pd.testing.assert_frame_equal(a, b, check_exact=True)

def test_all_of_it(calm, tmp_path):
    with serve(map(study, range(55))) as s:
        pages, t, q = get(s, tmp_path)
        (agent,) = s.agents
        assert agent.startswith('clinical_rl/') and 'ada@lab.org' in agent
        assert sum('countTotal' in x for x in s.asked) == 1 and all('pageSize=10' in x for x in s.asked if '/studies' in x)
        n = len(s.asked)
        with client() as c: v2.fetch(c, pages, PROGRAMS, asking(s))
        assert len(s.asked) == n # nothing is asked twice
    same(t, calm)
    assert len(t) == 55 and not q.n and list(t) == records.parsed('registry').names
    r = v2.reconcile(pages)
    assert r.values.tolist() == [['all', 55, 55, 55, '']]
    assert t.source.eq(f'ctgov_v2@{DAY}').all() and t.vintage.eq(pd.Timestamp(DAY)).all()
    same(v2.parse(pages, PROGRAMS, named_only=False), t) # again, without the network
    named = v2.parse(pages, PROGRAMS)
    same(named, t[t.drugs.notna()].reset_index(drop=True))
    assert set(named.drugs) == {'nivolumab', 'ipilimumab', 'imatinib'}

def test_a_question_a_program(calm, tmp_path):
    with serve([study(k) for k in range(50)] + [study(k, armsInterventionsModule=dict(interventions=[
            dict(type='DRUG', name='Opdivo'), dict(type='DRUG', name='Yervoy')])) for k in range(50, 55)]) as s:
        pages, t, _ = get(s, tmp_path, query='programs', workers=3)
        r = v2.reconcile(pages).set_index('job')
        assert list(r.index) == ['imatinib', 'ipilimumab', 'nivolumab'] and r.note.eq('').all() and (r.total == r.distinct).all()
        both = t[t.nct_id.ge(f'NCT{10_000_050}')]
        assert {'nivolumab', 'ipilimumab'} <= set(both.drugs.iloc[0].split('|')) # answers to two questions, one row
        assert t.nct_id.is_unique and r['distinct'].sum() > len(t)
    with serve(map(study, range(55))) as s:
        t = get(s, tmp_path/'oncology', query='oncology')[1]
        assert t.conditions.ne('Migraine').all() and 0 < len(t) <= 55

EXPIRED = lambda s, answer: (400, {}, b'pageToken has expired')
BUSY = lambda status, **h: lambda s, answer: (status, {k.replace('_', '-'): v for k, v in h.items()}, b'busy')
FAULTS = dict(
    empty_page=lambda s: s.empty.update((20, 30)), study_on_two_pages=lambda s: setattr(s, 'repeat', 2),
    token_expires=lambda s: s.on.update({4: EXPIRED}),
    token_expires_twice=lambda s: s.on.update({3: EXPIRED, 8: EXPIRED}),
    truncated_json=lambda s: s.on.update({2: lambda s, a: (200, {}, a[2][:-900])}),
    busy=lambda s: s.on.update({1: BUSY(429, Retry_After='1'), 3: BUSY(429), 5: BUSY(500), 6: BUSY(503)}))
@pytest.mark.parametrize('fault', FAULTS)
def test_trouble_on_the_way(calm, tmp_path, fault):
    with serve(map(study, range(55))) as s:
        FAULTS[fault](s)
        pages, t, q = get(s, tmp_path)
    same(t, calm)
    r = v2.reconcile(pages).iloc[0]
    assert not q.n and r.total == r.distinct == 55
    assert r.note == dict(token_expires='turned 2 times', token_expires_twice='turned 3 times').get(fault, '')

def test_trouble_for_good(tmp_path):
    with serve(map(study, range(30))) as s:
        s.on[2] = lambda s, a: (403, {}, b'who are you')
        with pytest.raises(HttpError) as e: get(s, tmp_path)
        assert '\n' not in str(e.value) and e.value.status == 403
        with pytest.raises(DataError, match='is not complete'): v2.parse(Pages(tmp_path, DAY), PROGRAMS)
        assert len(get(s, tmp_path)[1]) == 30 # goes on
        s.on = dict.fromkeys(range(99), lambda s, a: (200, {}, a[2].replace(b'"studies"', b'"trials"')))
        with pytest.raises(HttpError, match='studies'): get(s, tmp_path/'renamed')
        s.on = dict.fromkeys(range(999), lambda s, a: a if b'nextPage' in a[2] else EXPIRED(s, a)) # the last page never comes
        with pytest.raises(HttpError) as e: get(s, tmp_path/'expires')
        assert e.value.status == 400

def test_a_page_that_is_gone_is_fetched_again(calm, tmp_path):
    with serve(map(study, range(55))) as s:
        pages = get(s, tmp_path)[0]
        pages.path(pages.job('registry', 'all').lines[2]['sha256']).unlink()
        with pytest.raises(DataError, match='missing'): v2.parse(pages, PROGRAMS)
        n = s.pages
        same(get(s, tmp_path)[1], calm)
        assert s.pages == n + 4 # the third and those after it

def test_the_registry_changes_meanwhile(tmp_path):
    def update(s, answer): # the last study is updated and comes first: those between move by one, one slips through
        s.studies.insert(0, study(54, '2025-08-30', statusModule=dict(overallStatus='SUSPENDED')))
        del s.studies[-1]
    def slip(s, answer): # the first, seen already, goes to the end: the next page begins one too late
        s.studies.append(s.studies.pop(0))
    for n, change in enumerate((update, slip)):
        with serve(map(study, range(55))) as s:
            s.on[3] = change
            pages, t, q = get(s, tmp_path/str(n))
        r = v2.reconcile(pages).iloc[0]
        assert len(t) == 55 and r.total == r.distinct == 55 and r.got > 55 and r.note == 'turned 2 times'
        if change is update: assert t.set_index('nct_id').status[nct(study(54))] == 'SUSPENDED'
    with serve(map(study, range(55))) as s: # data of the next day come in between
        s.stamps = ['2025-08-29T09:00:05', '2025-08-30T09:00:07']
        pages, t, _ = get(s, tmp_path/'day')
        assert t.vintage.eq(pd.Timestamp('2025-08-29')).all() # a status is no newer than the oldest page
        assert 'data changed from 2025-08-29' in v2.reconcile(pages).note.iloc[-1]

def test_the_newest_of_two(tmp_path):
    old, new = study(1, '2024-01-01'), study(1, '2025-01-01', statusModule=dict(overallStatus='WITHDRAWN'))
    new['protocolSection']['statusModule']['lastUpdatePostDateStruct'] = dict(date='2025-01-01')
    for order in ([old, study(2), new], [new, study(2), old]):
        with serve(order) as s:
            pages, t, _ = get(s, tmp_path/str(order[0] is old), page_size=1)
        assert t.status.tolist() == ['WITHDRAWN', 'TERMINATED']
        assert v2.reconcile(pages).note[0] == '1 short; turned 2 times' # the API counts it twice

def test_a_count_that_lies(tmp_path):
    for more, note in ((3, '3 short; turned 2 times'), (-2, '2 more than counted')):
        with serve(map(study, range(25))) as s:
            s.more = more
            pages, t, _ = get(s, tmp_path/str(more))
        assert len(t) == 25 and v2.reconcile(pages).note.tolist() == [note]

def rewrite(s, f): # all pages are another text, or object, than the registry's
    s.on = dict.fromkeys(range(1, 999), lambda s, a: (200, {}, f(a[2], s)))

@pytest.mark.parametrize('said', [10**30, 'many', -1, 1.5, [9], True])
def test_a_count_that_is_none(said, calm, tmp_path):
    with serve(map(study, range(55))) as s:
        rewrite(s, lambda body, s: body.replace(b'"totalCount": 55', b'"totalCount": ' + json.dumps(said).encode()))
        pages, t, _ = get(s, tmp_path)
    same(t, calm)
    assert v2.reconcile(pages).note.tolist() == [f'the API gave no count, but {str(said)!r}']

CIRCLES = dict( # page, number of it -> page
    there_and_back=lambda x, n: x | dict(nextPageToken=x['nextPageToken'].split('.')[0] + ('.10.' if n % 2 else '.0.')),
    ever_new_names=lambda x, n: x | dict(nextPageToken=x['nextPageToken'].split('.')[0] + f'.20.{n}'),
    ever_empty=lambda x, n: x | dict(studies=[], nextPageToken=x['nextPageToken'].split('.')[0] + f'.20.{n}'))
@pytest.mark.parametrize('circle', CIRCLES)
def test_pages_in_a_circle(circle, calm, tmp_path):
    def led(body, s): return json.dumps(CIRCLES[circle](x, s.pages) if 'nextPageToken' in (x := json.loads(body)) else x).encode()
    with serve(map(study, range(55))) as s:
        rewrite(s, led)
        for _ in range(2): # goes on, and is refused again
            n = s.pages
            with pytest.raises(DataError, match='lead back to earlier ones.*run again later, or delete') as e: get(s, tmp_path)
            assert '\n' not in str(e.value) and s.pages - n <= v2.IDLE + 3
        s.on = {}
        Pages(tmp_path, DAY).job('registry', 'all').path.unlink() # as the error says
        same(get(s, tmp_path)[1], calm)

NO_JSON = dict(half_a_pair=rb'"\ud800"', other_half=rb'"\udc00 x"', not_a_number=b'NaN', infinity=b'-Infinity', control=b'"a\x01b"',
               no_utf8=b'"\xff"', deep=b'['*5000 + b']'*5000, zero_first=b'01')
NUMBERS = dict(long_number=b'9'*400, twice=b'1, "odd": 2') # the decoder takes these
@pytest.mark.parametrize('odd', NO_JSON | NUMBERS)
def test_a_record_that_is_no_json_costs_itself_only(odd, calm, tmp_path):
    text = (NO_JSON | NUMBERS)[odd]
    with serve(map(study, range(55))) as s:
        rewrite(s, lambda body, s: body.replace(b'"briefTitle": "Study 7 ', b'"odd": ' + text + b', "briefTitle": "Study 7 '))
        pages, t, q = get(s, tmp_path)
        assert s.pages == 6 # no page was asked for twice
    if odd in NUMBERS or not q.n: return same(t, calm) # a field that nobody reads
    same(t, calm[calm.nct_id.ne(nct(study(7)))].reset_index(drop=True))
    assert q.n == 1 and q.records().record[0] == nct(study(7)) and q.records().reason[0].startswith('no JSON')
    assert v2.reconcile(pages).note.tolist() == ['']
    with serve(map(study, range(55, 57))) as s: # what a later refresh reads again
        later = get(s, tmp_path, '2025-09-12', since='2025-09-01')[0]
        again = Quarantine(tmp_path, '2025-09-12')
        assert sum(b.num_rows for b in v2.stream(later, PROGRAMS, again, old=pages)) == 0
        assert again.records().record.tolist() == [nct(study(7))]

def test_a_page_that_cannot_be_cut(tmp_path):
    for k, cut in enumerate((lambda b: b[:-1], lambda b: b.replace(b'"studies": [', b'"studies": [}', 1), lambda b: b + b'x', lambda b: b.replace(b'"', b'', 1))):
        with serve(map(study, range(5))) as s:
            rewrite(s, lambda body, s: cut(body.replace(b'Study 1 ', rb'\ud800')))
            with pytest.raises(HttpError, match='not whole'): get(s, tmp_path/str(k))

def test_a_version_that_is_no_json(tmp_path, monkeypatch):
    t = study(1)
    with serve([t], {nct(t): [('2020-01-01', t), ('2021-01-01', t)]}) as s:
        answer = s.RequestHandlerClass.answer
        def broken(self, s, path, q):
            st, h, b = answer(self, s, path, q)
            return st, h, b.replace(b'Study 1 ', rb'\ud800 ') if path.endswith('/1') else b
        monkeypatch.setattr(s.RequestHandlerClass, 'answer', broken)
        pages, table, q = get(s, tmp_path, history='all')
        seen = v2.versions(pages, table, PROGRAMS, q)
    assert len(seen) == 1 and q.records().record.tolist() == [f'{nct(t)} version 1']

def changed(k, module, **fields): return study(k, **{module: fields})
def renamed(k, module, old, new):
    s = study(k)
    m = s['protocolSection'][module] if module else s['protocolSection']
    m[new] = m.pop(old)
    return s
BAD = [
    (changed(1, 'designModule', phases=['PHASE5']), "unknown phase 'PHASE5'"),
    (changed(2, 'statusModule', overallStatus='ASLEEP'), "unknown status 'ASLEEP'"),
    (changed(3, 'designModule', studyType='DREAM'), "unknown study type 'DREAM'"),
    (changed(4, 'armsInterventionsModule', interventions=[dict(type='SONG', name='x')]), "unknown intervention type 'SONG'"),
    (changed(5, 'designModule', enrollmentInfo=dict(count='12')), 'enrollmentInfo.count'),
    (changed(6, 'conditionsModule', conditions='Pain'), 'conditionsModule.conditions'),
    (changed(7, 'statusModule', startDateStruct=dict(date='03/2020')), "'03/2020' is not a date"),
    (changed(8, 'statusModule', studyFirstPostDateStruct=dict(date='2020-02-31')), 'is not a date'),
    (changed(9, 'designModule', enrollmentInfo=dict(count=-1)), 'enrollmentInfo.count'),
    (changed(10, 'identificationModule', nctId='NCT12'), 'no NCT number'),
    (renamed(11, 'statusModule', 'overallStatus', 'status'), "overallStatus"),
    (renamed(12, 'statusModule', 'studyFirstPostDateStruct', 'firstPosted'), 'studyFirstPostDateStruct is missing'),
    (renamed(13, 'designModule', 'phases', 'phaseList'), "phases is missing, and designModule has an unknown field 'phaseList'"),
    (renamed(14, 'conditionsModule', 'conditions', 'illnesses'), "unknown field 'illnesses'"),
    (renamed(15, '', 'armsInterventionsModule', 'arms'),
     "armsInterventionsModule is missing, and protocolSection has an unknown field 'arms'"),
    (renamed(16, 'sponsorCollaboratorsModule', 'leadSponsor', 'lead'), "unknown field 'lead'"),
    (dict(protocolSection='gone'), 'protocolSection'), ('no study', 'Expected')]

def test_what_cannot_be_read_is_set_aside(tmp_path):
    def broken(s, answer): # the last two of `BAD` name no study: they come with the first page
        page = json.loads(answer[2])
        return 200, {}, json.dumps(page | dict(studies=page['studies'] + [b for b, _ in BAD[-2:]])).encode()
    with serve([s for s, _ in BAD[:-2]] + [study(k) for k in range(20, 40)]) as s:
        s.on[1] = broken
        pages, t, q = get(s, tmp_path)
    assert t.nct_id.tolist() == [nct(study(k)) for k in range(20, 40)]
    aside = q.records()
    assert len(aside) == q.n == len(BAD) and aside.source.eq('registry').all() and aside.sha256.notna().all()
    for bad, why in BAD[:-2]: assert why in aside.set_index('record').reason[nct(bad)]
    for bad, why in BAD[-2:]: assert aside[~aside.record.str.startswith('NCT')].reason.str.contains(why, regex=False).any()
    q2 = Quarantine(tmp_path, DAY) # a parse again doesn't double it
    v2.parse(pages, PROGRAMS, q2)
    assert q2.n == q.n and len(q2.records()) == q.n

def test_what_is_odd_but_true(tmp_path):
    odd = [
        changed(1, 'statusModule', startDateStruct=dict(date='2020-02'), completionDateStruct=None,
                primaryCompletionDateStruct=dict(date='2021-12')),
        changed(2, 'designModule', enrollmentInfo=dict(count=99999999)),
        changed(3, 'identificationModule', briefTitle='Étude d’un  «baume»\n発明 | Opdivo®'),
        changed(4, 'designModule', phases=[]),
        changed(5, 'designModule', phases=['NA'], mood='a new field', score=dict(of='any', shape=[1])),
        study(6, conditionsModule=None, armsInterventionsModule=None, sponsorCollaboratorsModule=None) | dict(aNewSection={}),
        changed(7, 'designModule', phases=['PHASE3', 'PHASE2'], studyType='EXPANDED_ACCESS', enrollmentInfo=None),
        changed(8, 'statusModule', overallStatus='WITHHELD'),
        changed(9, 'eligibilityModule', eligibilityCriteria='ab cé\\"' * 5_000_000)] # 40 MB
    with serve(odd) as s: pages, t, q = get(s, tmp_path, page_size=3)
    assert q.records().empty and len(t) == 9 and v2.reconcile(pages).note.eq('').all()
    assert max(l['bytes'] for l in pages.job('registry', 'all').lines) > 40e6
    t = t.set_index(t.nct_id.str[-1])
    assert t.start_date['1'] == pd.Timestamp('2020-02-29') and t.completion_date['1'] == pd.Timestamp('2021-12-31')
    assert t.enrollment.isna().tolist() == [False, True, False, False, False, False, True, False, False]
    assert t.title['3'] == 'Étude d’un «baume» 発明 / Opdivo®' and t.drugs['3'] == 'nivolumab'
    assert t.phase.isna().tolist() == [False]*3 + [True] + [False]*5 and t.phase['5'] == 'NA' and t.phase['7'] == 'PHASE2|PHASE3'
    assert t.loc['6', ['conditions', 'interventions', 'lead_sponsor']].isna().all() and pd.isna(t.status['8'])
    assert t.interventions['1'] == 'Drug: BMS-936558|Device: Pump 1'

def test_only_what_is_new(calm, tmp_path):
    with serve(map(study, range(55))) as s:
        get(s, tmp_path)
        s.studies[7] = study(7, '2025-09-10', statusModule=dict(overallStatus='UNKNOWN'))
        s.studies.append(study(60, '2025-09-11'))
        s.stamps = ['2025-09-12T09:00:00']
        pages, t, _ = get(s, tmp_path, '2025-09-12', since=DAY)
        assert t.nct_id.tolist() == [nct(study(7)), nct(study(60))] and t.source.eq('ctgov_v2@2025-09-12').all()
        assert v2.reconcile(pages).total.tolist() == [2]
        same(get(s, tmp_path)[1], calm) # the first refresh is as it was
        n = s.pages
        assert len(get(s, tmp_path, '2025-09-12', since='2025-09-11')[1]) == 1 # another question of the same vintage begins anew
        assert s.pages == n + 1
        assert len(get(s, tmp_path, '2025-09-12')[1]) == 56 # and so does one without a day

def planned(k, count, title, posted=True):
    s = study(k, designModule=dict(enrollmentInfo=dict(count=count)), identificationModule=dict(briefTitle=title))
    if not posted: del s['protocolSection']['statusModule']['studyFirstPostDateStruct']
    del s['protocolSection']['statusModule']['lastUpdatePostDateStruct']
    return s

def test_versions(tmp_path):
    a, b = nct(study(0)), nct(study(1)) # posted on 2012-01-01 and 2013-02-02
    history = {a: [('2011-12-20', planned(0, 100, 'Nivolumab, as promised', posted=False)),
                   ('2011-12-28', planned(0, 120, 'Nivolumab, corrected')),
                   ('2013-05-05', planned(0, 60, 'Nivolumab, cut'))],
               b: [('2013-02-02', planned(1, 9, 'BMS-936558'))]}
    with serve([study(0), study(1), study(3), study(7)], history) as s:
        pages, t, q = get(s, tmp_path, history='all', workers=2)
        asked = [x for x in s.asked if '/history' in x]
        assert sorted(asked) == sorted([f'/api/int/studies/{n}/history' for n in (a, b, nct(study(7)))] + [
            f'/api/int/studies/{a}/history/{v}' for v in range(3)] + [f'/api/int/studies/{b}/history/0'])
        assert v2.reconcile(pages).note.tolist() == ['', '1 without a history']
        seen = v2.versions(pages, t, PROGRAMS, q)
        assert not q.n and list(seen) == [*t.columns, 'valid_from']
        assert seen[['nct_id', 'enrollment', 'title']].values.tolist() == [
            [a, 120, 'Nivolumab, corrected'], [a, 60, 'Nivolumab, cut'], [b, 9, 'BMS-936558']]
        assert seen.valid_from.dt.strftime('%F').tolist() == ['2012-01-01', '2013-05-05', '2013-02-02'] # not before it was posted
        assert seen.event_date.dt.strftime('%F').tolist() == ['2012-01-01', '2012-01-01', '2013-02-02']
        assert seen.vintage.eq(seen.valid_from).all()
        first = v2.first_registered(pages, t, PROGRAMS)
        assert first[['enrollment', 'title']].values.tolist() == [[100, 'Nivolumab, as promised'], [9, 'BMS-936558']]
        last = seen.drop_duplicates('nct_id', keep='last').drop(columns='valid_from')
        records.validate(last.assign(public_date=gate.public_date(last, 'registry')), 'registry', 'versions')
        history[a].append(('2025-09-01', planned(0, 61, 'Nivolumab, at last'))) # a later refresh gets the new version only
        s.studies[0] = study(0, '2025-09-02'); s.asked.clear()
        later = get(s, tmp_path, '2025-09-12', since='2025-09-01', history='all')
        assert [x for x in s.asked if '/history' in x] == [f'/api/int/studies/{a}/history{v}' for v in ('', '/3')]
        assert v2.versions(later[0], later[1], PROGRAMS).enrollment.tolist() == [120, 60, 61]
    with serve([study(0)], history) as s:
        get(s, tmp_path/'first', history='first')
        assert sum('/history/' in x for x in s.asked) == 1
        assert len(v2.versions(*get(s, tmp_path/'first', history='all')[:2], PROGRAMS)) == 3 # now all of them
        assert v2.versions(Pages(tmp_path/'none', DAY), t, PROGRAMS).empty

def test_killed_at_any_point(calm, tmp_path):
    "kill -9 at 20 random points; what is started again goes on, and the table is that of an undisturbed run."
    ctx = multiprocessing.get_context('forkserver')
    ctx.set_forkserver_preload(['clinical_rl.sources.registry_v2']) # or each process would import it all
    rng = random.Random(4)
    with serve(map(study, range(55))) as s:
        s.repeat, s.empty = 1, {10, 30}
        ask = asking(s, page_size=1)
        begin = lambda: ctx.Process(target=fetch, args=(tmp_path, DAY, PROGRAMS, ask))
        for _ in range(20): # gets two or three answers, and dies after the last of them: no run can be done before
            s.go_on.clear(); s.stall_after = len(s.asked) + rng.randint(2, 3)
            p = begin(); p.start()
            until(lambda: len(s.asked) >= s.stall_after or not p.is_alive())
            time.sleep(rng.random()*.02)
            p.kill(); p.join(); s.go_on.set()
            assert p.exitcode == -signal.SIGKILL
        s.stall_after = None
        p = begin(); p.start(); p.join()
        assert p.exitcode == 0
    pages, q = Pages(tmp_path, DAY), Quarantine(tmp_path, DAY)
    same(v2.parse(pages, PROGRAMS, q, named_only=False), calm)
    r = v2.reconcile(pages).iloc[0]
    assert not q.n and r.note == '' and r.distinct == r.total == 55

def test_processes_agree(tmp_path):
    with serve(map(study, range(100))) as s: pages, t, _ = get(s, tmp_path, page_size=1)
    q = Quarantine(tmp_path, DAY)
    same(v2.parse(pages, PROGRAMS, q, named_only=False, workers=2), t)
    b = list(v2.stream(pages, PROGRAMS))
    assert len(b) == 100 and all(x.schema == v2.SCHEMA for x in b)

def test_through_the_gate(calm):
    "The parsed table is what the rest of the pipeline reads."
    t = calm[calm.drugs.notna()].reset_index(drop=True)
    e = records.example()
    programs = records.validate(PROGRAMS, 'programs', 'here')
    raw = e.replace(registry=t, programs=programs)
    r = gate.prepare(raw)
    records.validate(r.registry, 'registry', 'here', snapshot=DAY, programs=programs.drug)
    assert r.registry.public_date.eq(r.registry.event_date).all() and r.registry.usable.any()
    seen = gate.as_of(r, '2018-06-30').registry
    assert 0 < len(seen) < len(t) and 'status' not in seen and not seen.title.str.contains('Glivec').any()

def test_a_file_of_ones_own(calm, tmp_path):
    studies = [study(k) for k in range(55)]
    line = lambda x: json.dumps(x, ensure_ascii=False)
    for name, text in {'answer.json': line(dict(studies=studies, totalCount=55)), 'list.json': json.dumps(studies, indent=1),
                       'lines.jsonl': '\n'.join(map(line, studies)) + '\n'}.items():
        for pack in (lambda b: b, gzip.compress):
            (file := tmp_path/name).write_bytes(pack(text.encode()))
            same(v2.parse_file(file, PROGRAMS, day=DAY), calm)
            file.write_bytes(pack(text.encode())[:-40])
            with pytest.raises(DataError, match='damaged or cut short') as e: v2.parse_file(file, PROGRAMS)
            assert '\n' not in str(e.value) and name in str(e.value)
    (file := tmp_path/'one.json').write_text(line(studies[3]))
    assert v2.parse_file(file, PROGRAMS).nct_id.tolist() == [nct(study(3))]
    file.write_text('{"rows": []}')
    with pytest.raises(DataError, match='neither'): v2.parse_file(file, PROGRAMS)
    with pytest.raises(DataError, match='missing'): v2.parse_file(tmp_path/'no.json', PROGRAMS)
    q = Quarantine(tmp_path, DAY)
    file.write_text(line([study(1), changed(2, 'designModule', phases=['PHASE5'])]))
    assert len(v2.parse_file(file, PROGRAMS, q)) == 1 and q.records().record.tolist() == [nct(study(2))]

SAMPLES = ROOT.parent/'shared'/'data'/'samples'/'ctgov_v2_studies.json.gz'

@pytest.mark.skipif(not SAMPLES.exists(), reason='the 50 real studies are not part of the project')
def test_real_studies(tmp_path, recwarn):
    programs = records.load_programs(ROOT/'data'/'programs.csv')
    q = Quarantine(tmp_path, DAY)
    t = v2.parse_file(SAMPLES, programs, q)
    assert len(t) == 50 and q.n == 0 and not len(recwarn)
