"A local server that speaks openFDA, EDGAR, CMS and CDC on invented data, and fails on request."
import io, json, re, threading, zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit

import pandas as pd

PROGRAMS = pd.DataFrame([
    ('nivolumab', 'Opdivo', 'BMS-936558', 'Bristol-Myers Squibb', 'Bristol-Myers Squibb|Ono Pharmaceutical'),
    ('trastuzumab', 'Herceptin', 'RO0452317', 'Roche', 'Genentech|Hoffmann-La Roche'),
    ('imatinib', 'Gleevec', 'STI571|Glivec', 'Novartis', 'Novartis')],
    columns=['drug', 'brand', 'synonyms', 'parent', 'sponsors']).assign(modality='drug', target='target', drug_class='class')

def _app(no, sponsor, brand, names, *subs):
    return dict(application_number=no, sponsor_name=sponsor, products=[dict(brand_name=brand, active_ingredients=[dict(name=n) for n in names])],
                submissions=[dict(submission_type=t, submission_number=n, submission_status='AP', submission_status_date=d, submission_class_code=c,
                                  review_priority='STANDARD') for t, n, d, c in subs])

APPS = [_app('BLA125554', 'BRISTOL MYERS SQUIBB', 'OPDIVO', ['NIVOLUMAB'], ('ORIG', '1', '20141222', 'TYPE 1'), ('SUPPL', '2', '20150304', 'EFFICACY'),
             ('SUPPL', '9', '201611', 'LABELING')),
        _app('BLA761234', 'BRISTOL MYERS SQUIBB', 'OPDUALAG', ['NIVOLUMAB', 'RELATLIMAB-RMBW'], ('ORIG', '1', '20220318', 'TYPE 1')),
        *[_app(f'BLA76190{i}', f'NACHAHMER GRÖSSE {i}', f'NIVOCAT{i}', ['NIVOLUMAB-ABCD'], ('ORIG', '1', f'2029010{i}', 'N/A')) for i in range(1, 4)],
        _app('BLA103792', 'GENENTECH', 'HERCEPTIN', ['TRASTUZUMAB'], ('ORIG', '1', '19980925', 'TYPE 1'), ('SUPPL', '5', '20061116', 'EFFICACY')),
        _app('BLA125427', 'GENENTECH', 'KADCYLA', ['ADO-TRASTUZUMAB EMTANSINE'], ('ORIG', '1', '20130222', 'TYPE 1')),
        _app('NDA021588', 'NOVARTIS', 'GLEEVEC', ['IMATINIB MESYLATE'], ('ORIG', '1', '20030418', 'TYPE 3'), ('SUPPL', '2', '20060101', 'MANUF (CMC)')),
        *[_app(f'ANDA07834{i}', 'SUN PHARMA', 'IMATINIB', ['IMATINIB MESYLATE'], ('ORIG', '1', f'2015120{i}', 'UNKNOWN')) for i in range(1, 4)]]

_FIELDS = ('accessionNumber', 'filingDate', 'reportDate', 'acceptanceDateTime', 'form', 'primaryDocument')
def _filings(cik, years): # one list a column
    rows = [(f'{cik:010d}-{y % 100:02d}-{i:06d}', f'{y}-{m:02d}-20', end, f'{y}-{m:02d}-20T21:00:00.000Z', form, doc) for y in years for i, m, form, end, doc in (
        (1, 2, '10-K', f'{y - 1}-12-31', 'k.htm'), (2, 5, '10-Q', f'{y}-03-31', 'q.htm'), (3, 6, '8-K', f'{y}-06-01', ''), (4, 7, 'S-8', '', 's.htm'))]
    return {c: list(v) for c, v in zip(_FIELDS, zip(*rows))}

CIKS = (14272, 1114448)
def submissions(cik):
    return dict(cik=str(cik), tickers=[f'T{cik % 100}'], filings=dict(recent=_filings(cik, [2020, 2021]), files=[
        dict(name=f'CIK{cik:010d}-submissions-001.json', filingCount=8), dict(name=f'CIK{cik:010d}-submissions-002.json', filingCount=4)]))
def older(cik, n): return _filings(cik, [[2018, 2019], [2017]][n - 1])
def facts(cik):
    k = lambda y, of, val: dict(val=val, accn=f'{cik:010d}-{of % 100:02d}-000001', start=f'{y}-01-01', end=f'{y}-12-31')
    return dict(cik=cik, facts={'us-gaap': dict(
        ResearchAndDevelopmentExpense=dict(units=dict(USD=[k(y, of, y * 1e6 + of) for of in range(2018, 2022) for y in (of - 1, of - 2)])),
        Assets=dict(units=dict(USD=[dict(val=5e9, accn=f'{cik:010d}-20-000001', end='2019-12-31')])))})

def _spending(brand, generic, mftr='Overall', code=None, **odd):
    row = dict(Brnd_Name=brand, Gnrc_Name=generic) | (dict(HCPCS_Cd=code, HCPCS_Desc='x') if code else dict(Mftr_Name=mftr))
    for y in (2022, 2023): row |= {f'Tot_Spndng_{y}': f'{y}.5', f'Tot_Clms_{y}': '40', f'Tot_Benes_{y}': '20'}
    return row | odd
SPENDING = {
    'uuid-b': [_spending('Opdivo', 'Nivolumab', code='J9299'), _spending('Opdualag', 'Nivolumab-Relatlimab-Rmbw', code='J9298'),
               _spending('Herceptin', 'Trastuzumab', code='J9355'), _spending('Catmab', 'Trastuzumab-Catt', code='Q5199'),
               _spending('Herceptin', 'Trastuzumab', code='J9000'), _spending('Étoile', 'Aspirin', code='J0001'), _spending('Zzz', 'Zinc', code='J0002')],
    'uuid-d': [*[_spending('Gleevec', 'Imatinib Mesylate', m) for m in ('Overall', 'Novartis', 'Other')], _spending('Imatinib Mesylate', 'Imatinib Mesylate'),
               _spending('Opdivo', 'Nivolumab', Tot_Spndng_2022='', Tot_Clms_2022='', Tot_Benes_2022='')],
    'uuid-m': [{k: v for k, v in _spending('Gleevec', 'Imatinib Mesylate').items() if 'Benes' not in k}]}

_HEAD = 'AGE_ADJUSTED_RATE|COUNT|EVENT_TYPE|POPULATION|RACE|SEX|SITE|YEAR'
def archive(sex='SEX', value='7.1'):
    cells = [f'{value if i == 3 else "7.1"}|{100 + i}|{e}|300000|{race}|{s}|Myeloma|{y}' for i, (e, race, s, y) in enumerate(
        (e, r, s, y) for e in ('Incidence', 'Mortality') for r in ('All Races', 'White') for s in ('Male and Female', 'Male') for y in (2018, 2019, '2015-2019'))]
    head = _HEAD.replace('SEX', sex)
    with zipfile.ZipFile(b := io.BytesIO(), 'w', zipfile.ZIP_DEFLATED) as z:
        z.writestr(zipfile.ZipInfo('BYSITE.TXT'), '\n'.join([head, *cells]))
        z.writestr(zipfile.ZipInfo('BYAREA.TXT'), '\n'.join([f'AREA|{head}', *(f'{a}|{c}' for a in ('Vermont', 'Northeast') for c in cells)]))
    return b.getvalue()

BOOK = """Purple Book,,
N/R/U,Applicant,BLA Number,Proprietary Name,Proper Name,License Type,Approval Date,Submission Type
,"Genentech, Inc.",103792,Herceptin,trastuzumab,351(a),25-Sep-98,Original
,Nachahmer Größe 1,761901,Nivocat1,nivolumab-abcd,351(k) Biosimilar,1-Jan-29,Original
"""

class Server(ThreadingHTTPServer):
    "`faults`: (part of the path, action) used up one by one; `tamper`: part of the path -> function of the answer; `asked`: (path, query, headers)."
    daemon_threads = True
    def __init__(self):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.asked, self.faults, self.tamper, self.lock = [], [], {}, threading.Lock()
        self.url = f'http://127.0.0.1:{self.server_port}'

    def fault(self, path):
        with self.lock:
            hit = next((f for f in self.faults if f[0] in path), None)
            if hit: self.faults.remove(hit)
        return hit and hit[1]

    def answer(self, path, q, agent): # (status, object or bytes, headers)
        if m := re.match(r'/fda', path):
            names = [n.lower() for n in re.findall(r'"([^"]+)"', q['search'])]
            found = [a for a in APPS if any(n in json.dumps(a['products'], ensure_ascii=False).lower() for n in names)]
            if not found: return 404, dict(error=dict(code='NOT_FOUND', message='No matches found!')), {}
            at, limit = int(q.get('search_after', '0=0')[2:]) or int(q.get('skip', 0)), int(q['limit'])
            link = {} if at + limit >= len(found) else {'Link': f'<{self.url}/fda?{urlencode(q | {"skip": 0, "search_after": f"0={at + limit}"})}>; rel="next"'}
            return 200, dict(meta=dict(last_updated='2026-03-10', results=dict(skip=0, limit=limit, total=len(found))), results=found[at:at + limit]), link
        if path.startswith('/sec') and '@' not in agent: return 403, b'<h1>Undeclared Automated Tool</h1>', {}
        if m := re.search(r'/submissions/CIK(\d+)\.json', path): return 200, submissions(int(m[1])), {}
        if m := re.search(r'/submissions/CIK(\d+)-submissions-00(\d)\.json', path): return 200, older(int(m[1]), int(m[2])), {}
        if m := re.search(r'/companyfacts/CIK(\d+)\.json', path): return (200, facts(int(m[1])), {}) if int(m[1]) == CIKS[0] else (404, b'', {})
        if path.startswith('/sec/Archives'): return 200, '<p>About Opdivo (nivolumab), größer</p>'.encode(), {}
        if m := re.match(r'/cms/dataset/([\w-]+)/data(/stats)?', path):
            rows = SPENDING[m[1]]
            return 200, dict(total_rows=len(rows), found_rows=len(rows)) if m[2] else rows[int(q['offset']):int(q['offset']) + int(q['size'])], {}
        if path == '/uscs.zip': return 200, archive(), {}
        if path == '/book.csv': return 200, BOOK.encode(), {}
        return 404, b'', {}

class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *a): pass
    def do_GET(self):
        u, s = urlsplit(self.path), self.server
        q = {k: v[0] for k, v in parse_qs(u.query).items()}
        s.asked.append((u.path, q, dict(self.headers)))
        status, obj, headers = s.answer(u.path, q, self.headers.get('User-Agent', ''))
        for part, change in s.tamper.items():
            if part in u.path and status == 200: obj = change(obj, q)
        body = obj if isinstance(obj, bytes) else json.dumps(obj, ensure_ascii=False).encode()
        length = len(body)
        match s.fault(u.path):
            case int(code): status, body, headers = code, b'busy', {}
            case (int(code), dict(more)): status, body, headers = code, b'busy', more
            case 'truncated': body = body[:len(body)//2] # a whole answer of half a page
            case 'reset':
                body, headers = body[:len(body)//2], headers | {'Content-Length': str(length)}
                self.close_connection = True
            case None: pass
        self.send_response(status)
        for k, v in ({'Content-Length': str(len(body))} | headers).items(): self.send_header(k, v)
        self.end_headers()
        self.wfile.write(body)

@contextmanager
def serving():
    "A server in a thread."
    s = Server()
    t = threading.Thread(target=s.serve_forever, kwargs=dict(poll_interval=.02), daemon=True)
    t.start()
    try: yield s
    finally: s.shutdown(); s.server_close(); t.join()
