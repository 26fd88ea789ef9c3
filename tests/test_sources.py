"Connectors of approvals, filings, spending and statistics against a server that speaks the APIs' forms, and fails."
import json, multiprocessing, os, random, re, signal
from types import SimpleNamespace as NS

import pandas as pd
import pytest
from server_kinds import APPS, CIKS, PROGRAMS, SPENDING, archive, serving

from clinical_rl import core, gate, records
from clinical_rl.core import DataError
from clinical_rl.sources import epidemiology, filings, regulatory, utilization
from clinical_rl.sources.client import Client, Host, HttpError, Pages, Quarantine, agent

SOURCES = dict(approvals=regulatory, filings=filings, utilization=utilization, epidemiology=epidemiology)
KEY = 'invented-key-1234'

@pytest.fixture(scope='module')
def one():
    with serving() as s: yield s

@pytest.fixture
def server(one):
    one.asked.clear(); one.faults.clear(); one.tamper.clear()
    return one

def params(kind, url, **more):
    base = dict(approvals=dict(url=f'{url}/fda', limit=2, purple_book=f'{url}/book.csv', workers=2),
                filings=dict(url=f'{url}/sec', archives=f'{url}/sec/Archives', contact='ada@lab.org', text=True, text_from='2021-01-01', workers=2),
                utilization=dict(url=f'{url}/cms', size=3, workers=1, datasets=dict(B='uuid-b', D='uuid-d', Medicaid='uuid-m')),
                epidemiology=dict(file=f'{url}/uscs.zip'))
    return NS(**base[kind] | more)

def client(server, slept=None, contact='ada@lab.org', **host):
    return Client(agent(contact), hosts={'127.0.0.1': Host(per_second=1e4, concurrency=4, **host)}, tries=4, timeout=300,
                  sleep=(slept if slept is not None else []).append)

def fetch(kind, server, folder, slept=None, **more):
    pages = Pages(folder, '2026-03-15')
    with client(server, slept) as c: SOURCES[kind].fetch(c, pages, PROGRAMS, params(kind, server.url, **more))
    return pages

def parse(kind, pages):
    q = Quarantine(pages.folder, pages.vintage)
    t = SOURCES[kind].parse(pages, PROGRAMS, q)
    dated = t.assign(public_date=gate.public_date(t, kind))
    records.validate(dated, kind, 'live', programs=PROGRAMS.drug)
    return t, q

@pytest.fixture(scope='module')
def calm(one, tmp_path_factory):
    "Table, counts and number of requests of an undisturbed run."
    one.faults.clear(); one.tamper.clear()
    out = {}
    for kind in SOURCES:
        one.asked.clear()
        pages = fetch(kind, one, tmp_path_factory.mktemp(kind))
        t, q = parse(kind, pages)
        assert q.n == 0
        out[kind] = NS(table=t, csv=t.to_csv(), counts=SOURCES[kind].reconcile(pages), asked=len(one.asked), pages=pages)
    return out

def test_tables(calm):
    a = calm['approvals'].table
    assert a.groupby('drug').size().to_dict() == dict(imatinib=5, nivolumab=7, trastuzumab=2) # without the conjugate
    assert a.set_index('record_id').event_date['app:nivolumab:FDA:2016-11-30:125554'] == pd.Timestamp('2016-11-30') # a month
    assert a[a.reference_product.eq(True)].application_no.unique().tolist() == ['021588', '125554', '761234', '103792']
    assert a.event_type.value_counts().to_dict() == dict(original=10, expansion=2, supplement=2)
    f = calm['filings'].table.set_index('record_id')
    assert len(f) == 30 and f.company.value_counts().to_dict() == {'Bristol-Myers Squibb': 15, 'Novartis': 15}
    k = f.loc['fil:0000014272-20-000001:10-K']
    assert k.rd_expense_usd == 2019e6 + 2020 and k.rd_months == 12 and k.total_assets_usd == 5e9 # as first said, not as repeated in 2021
    assert f.drugs.dropna().unique().tolist() == ['nivolumab'] and f.drugs.notna().sum() == 4
    u = calm['utilization'].table
    assert u[u.biosimilar].brand.unique().tolist() == ['Catmab'] and u[u.combination].brand.unique().tolist() == ['Opdualag']
    assert {'Herceptin (J9355)', 'Herceptin (J9000)'} <= set(u.brand) and u.beneficiaries[u.program.eq('Medicaid')].isna().all()
    assert len(u) == 2*5 + 2*2 + 1 + 2
    e = calm['epidemiology'].table
    assert e.region.fillna('US').value_counts().to_dict() == dict(US=8, Vermont=8) and e.source.eq('uscs@2026-03-15').all()

def test_counts_agree(calm):
    for kind in ('approvals', 'filings', 'utilization'):
        c = calm[kind].counts.dropna(subset='total')
        assert len(c) >= 2 and (c.total == c.distinct).all(), c
    notes = calm['filings'].counts.set_index('job').note
    assert 'Genentech' in notes['filers'] and 'Ono Pharmaceutical' in notes['filers'] and 'no tagged figures' in notes.iloc[1:].str.cat()
    assert 'Northeast' in calm['epidemiology'].counts.note[1]

FAULTS = dict(busy=429, busy_wait=(429, {'Retry-After': '7'}), error=500, truncated='truncated', reset='reset')
WHERE = dict(approvals='/fda', filings='/sec', utilization='/cms', epidemiology='/uscs')

@pytest.mark.parametrize('fault', FAULTS)
@pytest.mark.parametrize('kind', SOURCES)
def test_transport_fault(kind, fault, server, calm, tmp_path):
    "What the network does wrong costs another try, and changes nothing."
    server.faults += [(WHERE[kind], FAULTS[fault])] * 2
    slept = []
    t, q = parse(kind, fetch(kind, server, tmp_path, slept))
    assert t.to_csv() == calm[kind].csv and q.n == 0 and not server.faults
    assert len(server.asked) == calm[kind].asked + 2
    if fault == 'busy_wait': assert max(slept) >= 6.5, slept

@pytest.mark.parametrize('kind', SOURCES)
def test_gives_up_and_goes_on(kind, server, calm, tmp_path):
    "A host that stays broken ends the run in one line; the next run goes on."
    server.faults += [(WHERE[kind], 500)] * 4
    with pytest.raises(HttpError) as e: fetch(kind, server, tmp_path, workers=1)
    assert '\n' not in str(e.value) and e.value.status == 500
    server.faults.clear()
    t, _ = parse(kind, fetch(kind, server, tmp_path))
    assert t.to_csv() == calm[kind].csv

def test_empty_page_midway(server, calm, tmp_path):
    def nothing(obj, q): return obj | dict(results=[]) if q.get('search_after') == '0=2' else obj
    server.tamper['/fda'] = nothing
    pages = fetch('approvals', server, tmp_path)
    assert [l['n'] for l in pages.job('regulatory', 'drugsfda nivolumab').lines] == [2, 0, 1]
    assert '2 of 5 did not come' in regulatory.reconcile(pages).set_index('job').note['drugsfda nivolumab']
    server.tamper['/cms'] = lambda obj, q: [] if q.get('offset') == '3' else obj
    pages = fetch('utilization', server, tmp_path)
    assert [l['n'] for l in pages.job('utilization', 'B').lines] == [3, 0, 1]
    assert utilization.reconcile(pages).set_index('job').note['B'] == '3 of 7 did not come'

def test_duplicates_over_pages(server, calm, tmp_path):
    "A row put in while paging moves the others: what came twice counts once, and is noted."
    rows = lambda obj, q: [SPENDING['uuid-b'][int(q['offset']) - 1], *obj][:3] if int(q.get('offset', 0)) else obj
    server.tamper |= {'/cms/dataset/uuid-b': rows, '/fda': lambda obj, q: obj | dict(results=[APPS[0], *obj['results']]) if 'search_after' in q else obj}
    for kind, job in (('utilization', 'B'), ('approvals', 'drugsfda nivolumab')):
        pages = fetch(kind, server, tmp_path)
        t, q = parse(kind, pages)
        assert t.to_csv() == calm[kind].csv and q.n == 0
        assert SOURCES[kind].reconcile(pages).set_index('job').note[job].endswith('came more than once')

@pytest.mark.parametrize('lie', [-2, 9])
def test_total_that_lies(lie, server, calm, tmp_path):
    def total(obj, q):
        if 'meta' in obj: obj['meta']['results']['total'] += lie
        elif 'total_rows' in obj: obj['total_rows'] += lie
        return obj
    server.tamper |= {'/fda': total, '/stats': total}
    pages = fetch('approvals', server, tmp_path)
    assert parse('approvals', pages)[0].to_csv() == calm['approvals'].csv # the links lead to the end, whatever the total
    notes = regulatory.reconcile(pages).note
    assert notes.str.contains('more than the source' if lie < 0 else 'did not come').sum() == 3
    pages = fetch('utilization', server, tmp_path)
    assert len(utilization.reconcile(pages).note[0]) > 0
    assert parse('utilization', pages)[0].to_csv() == calm['utilization'].csv

def _deep(old, new):
    "Rename a key or change a value everywhere, once a page."
    return lambda obj, q: json.loads(json.dumps(obj, ensure_ascii=False).replace(old, new, 1))

FORMS = [ # kind, path, what changes, part of the reason
    ('approvals', '/fda', ('"submission_status"', '"submission_state"'), "field 'submission_status' is missing; is it 'submission_state' now?"),
    ('approvals', '/fda', ('"AP"', '"ZZ"'), "unknown submission_status 'ZZ'"),
    ('approvals', '/fda', ('"ORIG"', '"ODD"'), "unknown submission_type 'ODD'"),
    ('approvals', '/fda', ('"20141222"', '["20141222"]'), "field 'submission_status_date' is a list"),
    ('approvals', '/fda', ('"BLA125554"', '125554'), "field 'application_number' is a int"),
    ('approvals', '/fda', ('"TYPE 1"', '"TIER 1"'), "unknown submission_class_code 'TIER 1'"),
    ('filings', '/submissions/CIK0000014272.json', ('"2021-02-20"', '20210220'), "field 'filingDate' is a int"),
    ('filings', '/submissions/CIK0000014272.json', ('"2021-02-20"', '"soon"'), "'soon' is not a date"),
    ('filings', '/submissions/CIK0000014272.json', ('"0000014272-21-000001"', '"x"'), 'is no accession number'),
    ('filings', '/companyfacts/', ('"accn"', '"accession"'), "KeyError 'accn'"),
    ('utilization', '/cms/dataset/uuid-d', ('"Gnrc_Name"', '"Generic_Name"'), "field 'Gnrc_Name' is missing; is it 'Generic_Name' now?"),
    ('utilization', '/cms/dataset/uuid-b', ('"Tot_Clms_2023"', '"Total_Clms_2023"'), "field 'Tot_Clms_2023' is missing"),
    ('utilization', '/cms/dataset/uuid-d', ('"2022.5"', '{"usd": 1}'), "field 'Tot_Spndng_2022'"),
    ('utilization', '/cms/dataset/uuid-d', ('"2022.5"', '"many"'), 'is not a number')]

@pytest.mark.parametrize('kind,path,change,reason', FORMS, ids=[f'{f[0]}-{f[2][1]}' for f in FORMS])
def test_changed_form(kind, path, change, reason, server, calm, tmp_path):
    "A record of another form goes to quarantine with the reason; the others are there."
    server.tamper[path] = _deep(*change)
    t, q = parse(kind, fetch(kind, server, tmp_path))
    rows = q.records()
    assert rows.reason.str.contains(reason, regex=False).any(), rows.reason.tolist()
    assert rows.record.notna().all() and rows.sha256.notna().all() and (rows.source == ('regulatory' if kind == 'approvals' else kind)).all()
    assert set(t.record_id) <= set(calm[kind].table.record_id) and len(t) > len(calm[kind].table)/3
    parse(kind, Pages(tmp_path, '2026-03-15')) # again: nothing is set aside twice
    assert len(Quarantine(tmp_path, '2026-03-15', ()).records()) == len(rows)

@pytest.mark.parametrize('kind,path,change', [('approvals', '/fda', ('"results": [', '"result": [')), ('utilization', '/cms/dataset/uuid-b/data', ('[{', '{"a": [{')),
                                             ('filings', '/sec/submissions', ('"form"', '"type"'))])
def test_page_of_another_form(kind, path, change, server, tmp_path):
    "Where the next page could not be asked for, the run ends and says what is wrong."
    def broken(obj, q):
        text = json.dumps(obj, ensure_ascii=False)
        return (text.replace(*change, 1) + ('}' if change[1].startswith('{') else '')).encode()
    server.tamper[path] = lambda obj, q: broken(obj, q) if isinstance(obj, dict) == (kind != 'utilization') else obj
    with pytest.raises(DataError, match='another form') as e: fetch(kind, server, tmp_path)
    assert '\n' not in str(e.value) and not isinstance(e.value, HttpError)

def test_statistics_of_another_form(server, calm, tmp_path):
    server.tamper['/uscs'] = lambda obj, q: archive(value='many')
    t, q = parse('epidemiology', fetch('epidemiology', server, tmp_path/'a'))
    assert q.records().reason.eq('AGE_ADJUSTED_RATE is not a number from 0 to 1e9').all() and q.n == 2 and len(t) == len(calm['epidemiology'].table) - 2
    server.tamper['/uscs'] = lambda obj, q: archive(sex='GENDER')
    with pytest.raises(DataError, match='holds no cell'): parse('epidemiology', fetch('epidemiology', server, tmp_path/'b'))
    assert "field 'SEX' is missing" in Quarantine(tmp_path/'b', '2026-03-15', ()).records().reason[0]

def test_data_moved_while_paging(server, calm, tmp_path):
    "openFDA is loaded anew between two pages: the search starts over."
    seen = []
    def updated(obj, q):
        seen.append(1)
        obj['meta']['last_updated'] = '2026-03-10' if len(seen) < 2 else '2026-03-17'
        return obj
    server.tamper['/fda'] = updated
    pages = fetch('approvals', server, tmp_path, workers=1)
    assert parse('approvals', pages)[0].to_csv() == calm['approvals'].csv
    assert {l['data_time'] for l in pages.job('regulatory', 'drugsfda nivolumab').lines} == {'2026-03-17'}

def test_contact(server, tmp_path):
    "Without a contact nothing is asked; EDGAR itself would answer 403, which is not tried again."
    with client(server, contact=None) as c:
        with pytest.raises(DataError, match='set ingest.contact'):
            filings.fetch(c, Pages(tmp_path, 'v'), PROGRAMS, params('filings', server.url, contact=None))
        assert not server.asked
        with pytest.raises(HttpError) as e: c.get(f'{server.url}/sec/submissions/CIK{CIKS[0]:010d}.json')
    assert e.value.status == 403 and len(server.asked) == 1 and 'contact' in str(e.value)

def test_every_request_names_the_project(server, tmp_path):
    for kind in SOURCES: fetch(kind, server, tmp_path)
    assert {h['User-Agent'] for _, _, h in server.asked} == {agent('ada@lab.org')}

def test_missing_files(server, tmp_path):
    for kind, key, said in (('approvals', 'purple_book', 'purplebooksearch.fda.gov/downloads'), ('epidemiology', 'file', 'USCS-1999-<year>-ASCII.zip')):
        with pytest.raises(DataError, match='import/here.x is missing') as e: fetch(kind, server, tmp_path, **{key: 'here.x'})
        assert said in str(e.value) and 'params.yaml' in str(e.value) and not server.asked

def parse_empty(pages): return len(regulatory.parse(pages, PROGRAMS, Quarantine(pages.folder, pages.vintage)))

def test_nothing_found(server, calm, tmp_path):
    "Programs of which a source knows nothing are no error; an address that is wrong is one."
    pages, unknown = Pages(tmp_path, '2026-03-15'), PROGRAMS.iloc[:1].assign(drug='unknownmab', brand='Nobrand')
    with client(server) as c:
        alone = params('approvals', server.url, purple_book='')
        for _ in range(2): regulatory.fetch(c, pages, unknown, alone)
        assert len(server.asked) == 1 and parse_empty(pages) == 0
        with pytest.raises(HttpError, match='404'):
            regulatory.fetch(c, Pages(tmp_path, '2026-03-16'), unknown, params('approvals', f'{server.url}/nowhere', purple_book=''))
        regulatory.fetch(c, pages, pd.concat([unknown, PROGRAMS]), params('approvals', server.url))
    assert parse('approvals', pages)[0].to_csv() == calm['approvals'].csv
    assert regulatory.reconcile(pages).set_index('job').total['drugsfda unknownmab'] == 0

def test_pages_in_a_circle(server, calm, tmp_path):
    "A page that came before, or a token that leads back to one, ends the run at once; a file that EDGAR lists twice is fetched once."
    answer, n = type(server).answer, iter(range(10**6))
    def linked(to): # openFDA leads to search_after=to(number of the request)
        return lambda path, q, agent: (*answer(server, path, q, agent)[:2], {'Link': f'<{server.url}/fda?search_after=0%3D{to(next(n))}>; rel="next"'})
    try:
        server.answer = linked(lambda n: n % 2 * 2) # there and back
        for _ in range(2):
            with pytest.raises(DataError, match='lead back to earlier ones.*run again later, or delete'): fetch('approvals', server, tmp_path, workers=1)
        server.answer = linked(lambda n: 100 + n) # ever new names for nothing
        notes = regulatory.reconcile(fetch('approvals', server, tmp_path/'empty', workers=1)).set_index('job').note
        assert notes['drugsfda nivolumab'] == '3 of 5 did not come'
    finally: del server.answer
    assert len(server.asked) < 60
    server.tamper['/cms/dataset/uuid-b'] = lambda obj, q: SPENDING['uuid-b'][:3] if 'offset' in q else obj
    with pytest.raises(DataError, match='lead back to earlier ones'): fetch('utilization', server, tmp_path)
    server.tamper.clear(); server.asked.clear()
    def twice(obj, q):
        obj['filings']['files'] *= 3
        return obj
    server.tamper['/sec/submissions/CIK0000014272.json'] = twice
    assert parse('filings', fetch('filings', server, tmp_path))[0].to_csv() == calm['filings'].csv
    assert sum('14272-submissions-001' in path for path, *_ in server.asked) == 1

@pytest.mark.parametrize('lie', [10**30, 'many', -1, 10**8])
def test_total_that_is_none(lie, server, calm, tmp_path):
    def total(obj, q):
        if 'meta' in obj: obj['meta']['results']['total'] = lie
        elif 'total_rows' in obj: obj['total_rows'] = lie
        return obj
    server.tamper |= {'/fda': total, '/stats': total}
    for kind in ('approvals', 'utilization'): assert parse(kind, fetch(kind, server, tmp_path))[0].to_csv() == calm[kind].csv
    assert len(server.asked) < 60

ODD = [('utilization', '/cms/dataset/uuid-d/data', '"2022.5"', v) for v in ('NaN', '1e300', '"Infinity"', '9'*400, '"1e30"')] + [
       ('approvals', '/fda', '"20141222"', '"99991231"'), ('filings', '/companyfacts/', '2020002021.0', 'NaN'),
       ('filings', '/submissions/CIK0000014272.json', '"2021-02-20"', '"9999-02-20"')]
@pytest.mark.parametrize('kind,path,old,new', ODD, ids=[f'{k}-{n[:12]}' for k, *_, n in ODD])
def test_figures_that_cannot_be(kind, path, old, new, server, calm, tmp_path):
    server.tamper[path] = lambda obj, q: json.dumps(obj, ensure_ascii=False).replace(old, new, 1).encode()
    t, q = parse(kind, fetch(kind, server, tmp_path))
    assert q.n and q.records().reason.str.contains('is not a').all() and set(t.record_id) < set(calm[kind].table.record_id)

@pytest.mark.parametrize('odd', [rb'\ud800', b'\xff', b'\x01'])
def test_text_that_is_no_strict_json(odd, server, calm, tmp_path):
    "Half of a surrogate pair, a byte that is no UTF-8, a control character: read as far as it goes."
    for part in ('/fda', '/cms/dataset/uuid-b/data', '/sec/submissions'):
        server.tamper[part] = lambda obj, q: re.sub(rb'(Opdivo|OPDIVO|k\.htm)', lambda m: m[1] + odd, obj) if isinstance(obj, bytes) else re.sub(
            rb'(Opdualag|OPDUALAG|k\.htm)', lambda m: m[1] + odd, json.dumps(obj, ensure_ascii=False).encode()) if isinstance(obj, (dict, list)) else obj
    for kind in ('approvals', 'utilization', 'filings'):
        t, q = parse(kind, fetch(kind, server, tmp_path, **(dict(text=False) if kind == 'filings' else {})))
        assert len(t) == len(calm[kind].table) and q.n == 0
        t.to_parquet(tmp_path/'t.parquet')

def test_nested_too_deep(server, tmp_path):
    server.tamper['/cms'] = lambda obj, q: b'['*200_000 + b']'*200_000
    with pytest.raises(HttpError, match='not whole'): fetch('utilization', server, tmp_path)

def test_token_expires(server, calm, tmp_path):
    "Where the place to go on from is not known any more, the search starts over."
    stop = iter(range(1)) # the second page ends the run
    server.tamper['/fda'] = lambda obj, q: obj if next(stop, None) is not None else b'cut'
    with pytest.raises(HttpError): fetch('approvals', server, tmp_path, workers=1)
    server.tamper.clear()
    server.faults.append(('/fda', 400))
    pages = fetch('approvals', server, tmp_path, workers=1)
    assert not server.faults and parse('approvals', pages)[0].to_csv() == calm['approvals'].csv

def _contents(folder, pages):
    for f in folder.rglob('*'):
        if f.is_file(): yield pages.get(f.stem) if f.suffix == '.zst' else f.read_bytes()

def test_texts_are_fetched_once(server, calm, tmp_path):
    "A later vintage asks for the lists and figures again, and takes the texts of filings from the disk."
    fetch('filings', server, tmp_path)
    server.asked.clear()
    with client(server) as c: filings.fetch(c, later := Pages(tmp_path, '2026-04-15'), PROGRAMS, params('filings', server.url))
    assert len(server.asked) == 8 and not any('Archives' in p for p, _, _ in server.asked)
    t, old = parse('filings', later)[0], calm['filings'].table
    pd.testing.assert_frame_equal(t.drop(columns='source'), old.drop(columns='source'))

def test_other_programs(server, calm, tmp_path):
    "Programs added to a vintage are fetched too."
    pages = Pages(tmp_path, '2026-03-15')
    with client(server) as c: filings.fetch(c, pages, PROGRAMS.iloc[:1], params('filings', server.url))
    assert filings.parse(pages, PROGRAMS, Quarantine(tmp_path, 'v')).company.nunique() == 1
    assert parse('filings', fetch('filings', server, tmp_path))[0].to_csv() == calm['filings'].csv

def test_damaged_file(server, tmp_path):
    (tmp_path/'import').mkdir()
    (tmp_path/'import'/'half.zip').write_bytes(archive()[:-40])
    with pytest.raises(DataError, match='half.zip: no zip archive, or not whole: fetch the archive'): fetch('epidemiology', server, tmp_path, file='half.zip')

def test_key_is_nowhere_on_disk(server, calm, tmp_path, monkeypatch, caplog):
    "A key goes out with every request, and comes back in the link to the next page; it is in no file and no message."
    monkeypatch.setenv('FDA_KEY', KEY)
    caplog.set_level('DEBUG')
    server.faults += [('/fda', 500)] * 7
    pages = Pages(tmp_path, '2026-03-15')
    with client(server, key_env='FDA_KEY', key_param='api_key') as c:
        with pytest.raises(HttpError) as e: regulatory.fetch(c, pages, PROGRAMS, params('approvals', server.url, workers=1))
        regulatory.fetch(c, pages, PROGRAMS, params('approvals', server.url))
    fda = [q for p, q, _ in server.asked if p == '/fda']
    assert all(q['api_key'] == KEY for q in fda) and any('search_after' in q for q in fda)
    t, _ = parse('approvals', pages)
    t.to_csv(tmp_path/'table.csv'); regulatory.reconcile(pages).to_csv(tmp_path/'counts.csv')
    assert t.to_csv() == calm['approvals'].csv
    assert KEY not in str(e.value) + caplog.text and not any(KEY.encode() in b for b in _contents(tmp_path, pages))

def test_reparse_without_network(calm):
    for kind in SOURCES:
        assert parse(kind, Pages(calm[kind].pages.folder, '2026-03-15'))[0].to_csv() == calm[kind].csv

def test_second_fetch_asks_nothing(server, calm):
    for kind in SOURCES: fetch(kind, server, calm[kind].pages.folder)
    assert not server.asked

def _die(kind, server, folder, at): # in a child: killed when the disk has been written to for the `at`-th time
    real, n = os.fsync, [0]
    def fsync(fd):
        n[0] += 1
        if n[0] == at: os.kill(os.getpid(), signal.SIGKILL)
        real(fd)
    os.fsync = fsync
    fetch(kind, server, folder, workers=1)

@pytest.mark.parametrize('kind', SOURCES)
def test_kill_and_resume(kind, server, calm, tmp_path):
    "Killed at random points, several times in a row, the run ends with the table of an undisturbed one."
    r, fork = random.Random(7), multiprocessing.get_context('fork')
    ends = []
    for _ in range(4):
        child = fork.Process(target=_die, args=(kind, server, tmp_path, r.randint(1, 6)))
        child.start(); child.join()
        ends.append(child.exitcode)
        for f in (tmp_path/'jobs').rglob('*.jsonl'): # and a line torn by the kill
            if '"end"' not in f.read_text(): f.open('a').write('{"url": "http')
    assert set(ends) <= {0, -signal.SIGKILL} and ends[0], ends
    t, q = parse(kind, fetch(kind, server, tmp_path))
    assert t.to_csv() == calm[kind].csv and q.n == 0
    pd.testing.assert_frame_equal(SOURCES[kind].reconcile(Pages(tmp_path, '2026-03-15')), calm[kind].counts)

def test_as_of_sees_a_filing_on_its_day(calm):
    t = calm['filings'].table
    assert (gate.public_date(t, 'filings') == t.filed_date).all() and t.date_basis.eq('filed').all()
    assert (t.filed_date >= t.period_end.fillna(t.filed_date)).all()

def test_codes_are_carried_over():
    "Live events that hold dates only get back every code of the embedded table, and no row or first approval is lost."
    old = core.read_parquet(core.root()/'data'/'approvals.parquet').sort_values('record_id', ignore_index=True)
    live = old[old.agency.eq('FDA') & old.application_no.notna()].assign(
        **dict.fromkeys(['indications', 'lines', 'biomarkers', 'designations']), later_converted=False, later_withdrawn=False)
    both = regulatory.carry_over(records.validate(live, 'approvals', 'live'), old)
    pd.testing.assert_frame_equal(both[list(old)], old)
