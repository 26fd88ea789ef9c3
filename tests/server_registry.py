"""A registry on this machine that speaks ClinicalTrials.gov's API v2 over invented studies, and misbehaves where told to"""
import json, re, threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from clinical_rl.sources import registry_v2
from clinical_rl.sources.client import Client, Host, Pages, agent

CONDITIONS = ['Melanoma', 'Non-small Cell Lung Cancer', 'Migraine', 'Colorectal Cancer', 'Multiple Myeloma']
AGENTS = ['Nivolumab', 'BMS-936558', 'Imatinib Mesylate', 'Placebo', 'Ipilimumab', 'Glivec', 'An Invented Balm']
SPONSORS = ['Institute of Inventions', 'Clínica São Brás', 'Bristol-Myers Squibb', 'Nordic Trial Group']

def study(k, updated=None, **modules): # study k, the same whenever it is made; module='...': None leaves one out
    day = f'{2012 + k % 11}-{1 + k % 12:02d}-{1 + k % 28:02d}'
    protocol = dict(
        identificationModule=dict(nctId=f'NCT{10_000_000 + k}', orgStudyIdInfo=dict(id=f'INV-{k}'),
                                  briefTitle=f'Study {k} of {AGENTS[k % 7]} in {CONDITIONS[k % 5]}'),
        statusModule=dict(overallStatus=['RECRUITING', 'COMPLETED', 'TERMINATED'][k % 3], statusVerifiedDate='2024-05',
            startDateStruct=dict(date=day[:7] if k % 4 == 0 else day),
            completionDateStruct=dict(date=f'{2015 + k % 13}-03', type='ESTIMATED'),
            studyFirstSubmitDate=day, studyFirstPostDateStruct=dict(date=day, type='ACTUAL'),
            lastUpdatePostDateStruct=dict(date=updated or f'2024-{1 + k % 12:02d}-15', type='ACTUAL')),
        sponsorCollaboratorsModule=dict(leadSponsor=dict(name=SPONSORS[k % 4], **{'class': 'OTHER'})),
        descriptionModule=dict(briefSummary=f'Invented text, never meant to be true: {"naïve " * (k % 9)}'),
        conditionsModule=dict(conditions=[CONDITIONS[k % 5], CONDITIONS[(k + 2) % 5]], keywords=['invented']),
        designModule=dict(studyType='INTERVENTIONAL', phases=[['PHASE2'], ['PHASE1', 'PHASE2'], ['NA'], ['PHASE3']][k % 4],
                          enrollmentInfo=dict(count=20 + k, type='ESTIMATED')),
        armsInterventionsModule=dict(interventions=[dict(type='DRUG', name=AGENTS[k % 7]),
                                                    dict(type='DEVICE', name=f'Pump {k % 3}')]),
        eligibilityModule=dict(eligibilityCriteria='Anybody invented', sex='ALL'))
    for name, module in modules.items(): protocol[name] = protocol.get(name, {}) | module if module is not None else None
    return dict(protocolSection={m: x for m, x in protocol.items() if x is not None}, hasResults=k % 5 == 0)

def nct(s): return s['protocolSection']['identificationModule']['nctId']

class Registry(ThreadingHTTPServer):
    "The studies, what was asked, and what to do on which request for a page."
    daemon_threads = True
    def __init__(self, studies, history=None):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.studies, self.history = list(studies), history or {} # history: NCT number -> list of (day, study)
        self.on = {}        # number of a request for a page, from 1: function of this server and the answer
        self.empty = set()  # offsets before which an empty page comes
        self.repeat = 0     # studies of the last page that come again on the next
        self.more = 0       # by how much the count lies
        self.stamps = ['2025-08-29T09:00:05'] # the last one stays
        self.asked, self.agents, self.pages, self.lock = [], set(), 0, threading.Lock()
        self.stall_after, self.go_on = None, threading.Event() # after so many requests none is answered until it is set
    @property
    def host(self): return f'http://127.0.0.1:{self.server_address[1]}/api/v2'

    def found(self, q):
        "Studies that a query finds."
        text = lambda s, *modules: json.dumps([s['protocolSection'].get(m) for m in modules], ensure_ascii=False).lower()
        out = self.studies
        if names := q.get('query.intr'):
            names = [n.lower() for n in re.findall(r'"([^"]+)"', names)]
            out = [s for s in out if any(n in text(s, 'armsInterventionsModule', 'identificationModule') for n in names)]
        if words := q.get('query.cond'):
            out = [s for s in out if any(w in text(s, 'conditionsModule') for w in words.lower().split(' or '))]
        if ids := q.get('filter.ids'): out = [s for s in out if nct(s) in re.split('[,|]', ids)]
        if r := re.fullmatch(r'AREA\[LastUpdatePostDate\]RANGE\[(.*),MAX\]', q.get('filter.advanced', '')):
            out = [s for s in out if s['protocolSection']['statusModule']['lastUpdatePostDateStruct']['date'] >= r[1]]
        return out

    def page(self, q):
        found, size = self.found(q), int(q.get('pageSize', 10))
        question = hash(tuple(sorted((k, v) for k, v in q.items() if k not in ('pageToken', 'countTotal', 'pageSize'))))
        token = q.get('pageToken', f'{question}.0.')
        if not token.startswith(f'{question}.'): return 400, {}, b'pageToken does not belong to these parameters'
        at, was_empty = int(token.split('.')[1]), token.endswith('.e')
        if at in self.empty and not was_empty:
            return 200, {}, json.dumps(dict(studies=[], nextPageToken=f'{question}.{at}.e')).encode()
        body = dict(studies=found[max(0, at - self.repeat):at + size])
        if at + size < len(found): body['nextPageToken'] = f'{question}.{at + size}.'
        if q.get('countTotal') == 'true': body['totalCount'] = len(found) + self.more
        return 200, {}, json.dumps(body, ensure_ascii=False).encode()

class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *_): pass
    def do_GET(self):
        s, at = self.server, urlsplit(self.path)
        q = dict(parse_qsl(at.query))
        with s.lock:
            s.agents.add(self.headers['User-Agent'])
            s.asked.append(self.path)
            status, headers, body = self.answer(s, at.path, q)
            stalled = s.stall_after is not None and len(s.asked) > s.stall_after
        if stalled: s.go_on.wait(600)
        headers = headers | {'Content-Type': 'application/json', 'Content-Length': str(len(body))}
        try:
            self.send_response(status)
            for k, v in headers.items(): self.send_header(k, v)
            self.end_headers()
            self.wfile.write(body)
        except OSError: self.close_connection = True # it was killed

    def answer(self, s, path, q):
        if path == '/api/v2/version':
            at = s.stamps.pop(0) if len(s.stamps) > 1 else s.stamps[0]
            return 200, {}, json.dumps(dict(apiVersion='2.0.5', dataTimestamp=at)).encode()
        if path == '/api/v2/studies':
            s.pages += 1
            answer = s.page(q)
            return (s.on[s.pages](s, answer) or s.page(q)) if s.pages in s.on else answer
        if m := re.fullmatch(r'/api/int/studies/(NCT\d+)/history(?:/(\d+))?', path):
            versions = s.history.get(m[1])
            if versions is None: return 404, {}, b'NCT number not found'
            if m[2]: return 200, {}, json.dumps(dict(studyVersion=int(m[2]), study=versions[int(m[2])][1])).encode()
            return 200, {}, json.dumps(dict(changes=[dict(version=v, date=d, status='RECRUITING', moduleLabels=['Study Status'])
                                                     for v, (d, _) in enumerate(versions)])).encode()
        return 404, {}, b'no such path'

@contextmanager
def serve(studies, history=None):
    "A registry that answers while the block lasts."
    s = Registry(studies, history)
    threading.Thread(target=s.serve_forever, args=(.02,), daemon=True).start()
    try: yield s
    finally: s.go_on.set(); s.shutdown(); s.server_close()

def client(sleep=lambda seconds: None):
    return Client(agent('ada@lab.org'), {'127.0.0.1': Host(per_second=1e4, concurrency=4)}, sleep=sleep)

def fetch(folder, vintage, programs, ask): # importable, for a process that is killed
    with client() as c: registry_v2.fetch(c, Pages(folder, vintage), programs, ask)
