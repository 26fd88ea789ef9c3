"The client and the raw pages against a real local host: whatever breaks, nothing is lost, doubled or told to strangers."
import email.utils, hashlib, io, itertools, json, logging, os, pickle, random, re, resource, signal, subprocess, sys, threading, time, traceback
from urllib.parse import quote

import httpx, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from clinical_rl.core import DataError
from clinical_rl.sources import client as c
from conftest import until
from servers import Host, Reply, gzipped, paged

KEY = 'S3cret/Key+42=='
GOOD = json.dumps({'title': 'Étude naïve, 試験'}, ensure_ascii=False).encode()
# not deadline-bound: the machine may be busy
relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

class Time:
    "A clock that only sleeping moves."
    def __init__(self): self.now, self.slept = 0.0, []
    def sleep(self, s): self.slept.append(s); self.now += s
    def clock(self): return self.now

@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for k in list(os.environ):
        if k.lower().endswith('_proxy'): monkeypatch.delenv(k)

@pytest.fixture
def serve():
    "Start hosts; in the end each of them must have been told who asks."
    hosts = []
    def start(*script): hosts.append(Host(*script).__enter__()); return hosts[-1]
    yield start
    for h in hosts:
        h.__exit__()
        assert all(re.fullmatch(r'clinical_rl/\S+ \(ada@lab\.org\)', s.headers['User-Agent']) for s in h.seen)

@pytest.fixture
def ask():
    "Make clients on a clock of their own."
    made = []
    def make(hosts=None, **kw):
        t = Time()
        made.append(c.Client(c.agent('ada@lab.org'), hosts, **dict(sleep=t.sleep, clock=t.clock, timeout=300) | kw))
        made[-1].t = t
        return made[-1]
    yield make
    for x in made: x.__exit__()

@pytest.fixture
def pages(tmp_path): return c.Pages(tmp_path/'live', '2025-10-31')

def error(client, *args, **kw): # the error of a request that must fail, looked at from all sides
    with pytest.raises(c.HttpError) as e: client.get(*args, **kw)
    assert '\n' not in str(e.value) and e.value.__context__ is None
    return e.value

FAULTS = dict(
    busy=Reply(b'slow down', 429), busy_seconds=Reply(b'', 429, {'Retry-After': '31'}), e500=Reply(b'', 500), e502=Reply(b'<html>', 502),
    e503=Reply(b'', 503), e503_seconds=Reply(b'', 503, {'Retry-After': '31'}), e504=Reply(b'', 504), hang=Reply(hang=True),
    short=Reply(GOOD, cut=9), reset=Reply(GOOD, cut=9, reset=True), nothing=Reply(GOOD, cut=0, reset=True), chunked=Reply(GOOD, chunked=True, cut=9),
    half_json=Reply(GOOD[:-9]), page=Reply(b'<html>We are being maintained</html>'), half_gzip=gzipped(GOOD, cut=-12), no_crc=gzipped(GOOD, cut=-8),
    bad_gzip=gzipped(GOOD*99, spoil=True), plain_gzip=Reply(GOOD, headers={'Content-Encoding': 'gzip'}), brotli=Reply(GOOD, headers={'Content-Encoding': 'br'}))

class Impatient(httpx.HTTPTransport):
    "Hangs up on the first `n` requests when nothing has come for a while, and is patient with all others, so that no slow machine adds a fault."
    def __init__(self, n): super().__init__(); self.n = n
    def handle_request(self, request):
        self.n -= 1
        if self.n >= 0: request.extensions['timeout'] = request.extensions['timeout'] | {'read': .2}
        return super().handle_request(request)

@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_that_passes_costs_a_try(fault, serve, ask):
    h = serve(FAULTS[fault], FAULTS[fault], gzipped(GOOD))
    client = ask({'127.0.0.1': c.Host(per_second=1e6)}, transport=Impatient(2 if fault == 'hang' else 0))
    assert client.get(h.url, check=json.loads).body == GOOD
    assert until(lambda: len(h.seen) >= 3) and len(h.seen) == 3
    if 'seconds' in fault: assert client.t.slept == [31, 31]
    else: assert 0 < client.t.now < 2 + 4 + 0.01

@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_that_stays_is_given_up_in_one_line(fault, serve, ask):
    h = serve(FAULTS[fault])
    e = error(ask(tries=3, transport=Impatient(3 if fault == 'hang' else 0)), f'{h.url}/studies', {'page': 2}, check=json.loads)
    assert until(lambda: len(h.seen) >= 3) and len(h.seen) == 3
    assert str(e).startswith(f'{h.url}/studies?page=2: ') and str(e).endswith('given up after 3 tries; run again later, what came so far is kept')
    assert e.url == f'{h.url}/studies?page=2'
    if FAULTS[fault].status >= 400: assert e.status == FAULTS[fault].status and str(e.status) in str(e)

def test_a_busy_host_is_left_alone_by_all(serve, ask):
    "One request was refused; another that had its turn already waits all the same."
    h = serve(Reply(status=429, headers={'Retry-After': '50'}), Reply())
    client = ask()
    client.get(h.url)
    assert client._lane(httpx.URL(h.url)).held == 50
    t = Time()
    def sleep(s):
        if not t.slept: lane.hold(30) # another thread is told to wait while this one sleeps up to its turn
        t.sleep(s)
    lane = c._Lane(c.Host(per_second=1), t.clock, sleep)
    lane.turn(); lane.turn()
    assert t.now >= 30

def test_retry_after_as_a_date(serve, ask):
    now, then = (email.utils.formatdate(1.8e9 + s, usegmt=True) for s in (0, 77))
    client = ask(transport=httpx.MockTransport(lambda r, n=itertools.count(): httpx.Response(200) if next(n) else
                                               httpx.Response(503, headers={'Retry-After': then, 'Date': now})))
    client.get('https://api.lab.org')
    assert client.t.slept == [77]

@pytest.mark.parametrize('said', [f'Mon, 01 Jan {"9"*20} 00:00:00 GMT', f'Mon, 01 Jan 2040 {"9"*20}:00:00 GMT', '9'*400, 'inf', 'nan'])
def test_a_wait_beyond_all_numbers_is_none(said, serve, ask):
    "What no calendar and no clock can hold is as if nothing were said: the next try is the client's own matter."
    h = serve(Reply(status=503, headers={'Retry-After': said}), Reply())
    client = ask(); client.get(h.url)
    assert len(h.seen) == 2 and max(client.t.slept, default=0) <= 2

def test_a_wait_that_is_too_long_fails_at_once(serve, ask):
    h = serve(Reply(status=503, headers={'Retry-After': '7200'}))
    e = error(ask(), h.url)
    assert len(h.seen) == 1 and 'asks to wait 7200 s; run again later' in str(e)

@pytest.mark.parametrize('status, remedy', {400: 'correct the request', 401: 'check the key', 403: 'the contact in params.yaml', 404: 'moved',
                                            304: 'correct the request'}.items())
def test_a_refusal_is_final(status, remedy, serve, ask):
    h = serve(Reply(b'{"error":\n "No matches\tfound"}' if status != 304 else b'', status))
    e = error(ask(), h.url)
    assert len(h.seen) == 1 and e.status == status and remedy in str(e)
    if status != 304: assert json.loads(e.text) == {'error': 'No matches found'}

def test_nobody_there(ask):
    with Host(Reply()) as h: pass
    e = error(ask(tries=2), h.url)
    assert e.status is None and 'ConnectError' in str(e)
    assert 'correct the address' in str(error(ask(), 'ftp://lab.org/x'))
    with pytest.raises(DataError, match='correct the address'): ask().get('http://lab.org:port')
    with pytest.raises(DataError, match='password'): ask().get('https://ada:pw@lab.org')
    for trouble in (httpx.ConnectTimeout, httpx.WriteError, httpx.ProxyError):
        def broken(request): raise trouble('as a test')
        assert f'{trouble.__name__} (as a test)' in str(error(ask(tries=2, transport=httpx.MockTransport(broken)), 'https://lab.org'))

def test_a_body_that_drips_is_given_up(serve, ask):
    "Each piece comes in time, the whole does not: a clock that moves at every look."
    h = serve(Reply(b'x'*2_000_000))
    e = error(ask(tries=1, whole=3, clock=itertools.count().__next__), h.url)
    assert 'no whole body within 3 s' in str(e)

def test_a_big_body_and_one_too_big(serve, ask):
    big = random.Random(0).randbytes(1_000_000)*40
    h = serve(Reply(big), gzipped(bytes(40_000_000)), Reply(big), gzipped(bytes(40_000_000)))
    client = ask()
    assert client.get(h.url).body == big
    assert client.get(h.url).body == bytes(40_000_000)
    for _ in range(2): assert 'a body above 1 MB; ask for less' in str(error(ask(max_bytes=1e6), h.url))
    assert len(h.seen) == 4

def test_words_of_all_kinds_arrive(serve, ask):
    h = serve(Reply(GOOD))
    a = ask().get(f'{h.url}/études', dict(q='試験 "x" & y+z', token=None, pages=[1]))
    assert h.seen[0].params == {'q': '試験 "x" & y+z', 'pages': '1'} and h.seen[0].path == quote('/études')
    assert json.loads(a.body)['title'] == 'Étude naïve, 試験' and a.status == 200

def test_connections_are_used_again(serve, ask):
    h = serve(Reply(GOOD), gzipped(GOOD), Reply(GOOD, chunked=True))
    client = ask()
    for _ in range(6): assert client.get(h.url).body == GOOD
    assert len({s.connection for s in h.seen}) == 1 and h.seen[0].headers['Accept-Encoding'] == 'gzip, deflate'

@pytest.mark.parametrize('limit', [1, 3])
def test_never_more_at_once_than_the_host_allows(limit, serve, ask):
    full = threading.Event()
    def slow(seen):
        if h.under_way >= limit: full.set()
        full.wait(300) # nobody leaves before the house is full
        return Reply(seen.params['i'].encode())
    h = serve(slow)
    client = ask({h.name: c.Host(per_second=1000, concurrency=limit)})
    assert [a.body for a in client.map(lambda i: client.get(h.url, {'i': i}), range(20), workers=8)] == [b'%d' % i for i in range(20)]
    assert h.most == limit

@given(rate=st.floats(0.1, 50), steps=st.lists(st.tuples(st.sampled_from(['turn', 'turn', 'hold', 'idle']), st.floats(0, 100)), max_size=40))
@relaxed
def test_turns_keep_their_distance(rate, steps):
    t = Time()
    lane, begun, held = c._Lane(c.Host(per_second=rate), t.clock, t.sleep), [], 0
    for step, s in steps:
        if step == 'turn': lane.turn(); begun.append(t.now); assert t.now >= held - 1e-6
        elif step == 'hold': lane.hold(s); held = max(held, t.now + s)
        else: t.now += s
    assert all(b - a >= 1/rate - 1e-6 for a, b in itertools.pairwise(begun))

def test_threads_share_the_turns(serve, ask):
    h = serve(Reply())
    client = ask({'127.0.0.1': c.Host(per_second=4, concurrency=8)})
    list(client.map(lambda i: client.get(h.url), range(24), workers=8))
    assert client._lane(httpx.URL(h.url)).free >= 24/4 and len(h.seen) == 24

def test_limits_are_found_by_port_host_and_domain(ask):
    client = ask({'sec.gov': c.Host(10), 'efts.sec.gov': c.Host(5), 'lab.org:8080': c.Host(7)})
    lane = lambda u: client._lane(httpx.URL(u))
    assert lane('https://data.sec.gov/x') is lane('https://www.sec.gov/y') is not lane('https://efts.sec.gov')
    assert [lane(u).host.per_second for u in ('https://data.sec.gov', 'https://efts.sec.gov', 'http://lab.org:8080', 'http://lab.org', 'http://notsec.gov')] == [10, 5, 7, 1, 1]

def test_an_error_ends_a_map():
    "The others do not sleep through their back-off of an hour first, and nothing more is begun."
    sleeping, begun = threading.Barrier(4), []
    def host(request):
        begun.append(request)
        sleeping.wait(300) # all four have asked
        return httpx.Response(404 if request.url.path == '/3' else 500)
    with c.Client(c.agent('ada@lab.org'), {'lab.org': c.Host(1e6, 4)}, transport=httpx.MockTransport(host)) as client:
        client._random.uniform = lambda a, b: 3600
        with pytest.raises(c.HttpError, match='404'): list(client.map(lambda i: client.get(f'https://lab.org/{i}'), range(100), workers=4))
    assert len(begun) == 4

# -- who asks, and what is not told

@pytest.mark.parametrize('name', ['', None, 'python-httpx/0.28', 'clinical_rl'])
def test_no_client_without_a_name(name):
    with pytest.raises(DataError, match='does not name the project'): c.Client(name)

def test_edgar_needs_a_contact():
    for contact in (None, '', ' ', 'Ada', 'ada@lab'):
        with pytest.raises(DataError, match='set ingest.contact in params.yaml'): c.agent(contact, need_contact=True)
    assert c.agent('Ada Lovelace ada@lab.org', need_contact=True).endswith('(Ada Lovelace ada@lab.org)')

@pytest.fixture
def logged():
    "Everything that any logger says, as text."
    out = io.StringIO()
    handler, top = logging.StreamHandler(out), logging.getLogger()
    level = top.level
    top.addHandler(handler); top.setLevel(logging.DEBUG)
    yield out
    top.removeHandler(handler); top.setLevel(level)

def told(*texts): # is the key in one of them, in some spelling?
    spellings = {KEY, quote(KEY), quote(KEY, safe=''), quote(KEY, safe='').lower(), json.dumps(KEY)[1:-1], 'S3cret'}
    return [t for t in texts for s in spellings if s in t]

@pytest.mark.parametrize('how', ['param', 'header', 'basic', 'call'])
def test_a_key_is_told_to_its_host_alone(how, serve, ask, pages, logged, monkeypatch):
    monkeypatch.setenv('LAB_KEY', KEY + '\n')
    def echo(seen):
        say = seen.params.get('api_key') or seen.headers.get('X-Key') or KEY
        if seen.path == '/away': return Reply(status=302, headers={'Location': f'{other.url}/'})
        if seen.path == '/here': return Reply(status=302, headers={'Location': '/page?api_key=' + quote(say, safe='')})
        if seen.path == '/evil': return Reply(status=302, headers={'Location': f'{other.url}/?k={quote(say, safe="")}'})
        if seen.path != '/page': return Reply(f'bad key {say} in {quote(say)}'.encode(), int(seen.path[1:]))
        return Reply(json.dumps({'next': f'{h.url}/page?api_key={quote(say, safe="")}', 'key': say}).encode(),
                     headers={'Link': f'<{h.url}/page?api_key={quote(say, safe="")}&skip=1>; rel="next"'})
    h, other = serve(echo), serve(Reply())
    host = dict(param=c.Host(key_env='LAB_KEY', key_param='api_key'), header=c.Host(key_env='LAB_KEY', key_header='X-Key'),
                basic=c.Host(key_env='LAB_KEY', key_header='Authorization'), call=c.Host())[how]
    kw = dict(secret={'api_key': KEY}) if how == 'call' else {}
    client = ask({'127.0.0.1': host}, tries=2) # the stranger lives there too, behind another port
    a = client.get(f'{h.url}/page', {'q': 1}, **kw)
    sent = str(h.seen[0].params) + str(h.seen[0].headers)
    assert KEY in sent or how == 'basic' and 'Basic UzNjcmV0L0tleSs0Mj09Og==' in sent
    job = pages.job('lab', 'page')
    job.add(a.body, a.url, {'q': 1, 'api_key': KEY}, n=1, next=a.headers['link']) # a connector's slip is caught too
    client.get(a.headers['link'].split('>')[0][1:], **kw) # the cleaned link gets its key again
    if 'api_key' in h.seen[0].params: assert h.seen[1].params == {'api_key': KEY, 'skip': '1'}
    client.get(f'{h.url}/here', **kw)
    client.get(f'{h.url}/away', **kw)
    with pytest.raises(c.HttpError, match='redirect to 127.0.0.1 with the key in its address'): client.get(f'{h.url}/evil', **kw)
    assert len(other.seen) == 1 and not told(str(other.seen)) and 'Authorization' not in other.seen[0].headers
    errors = [error(client, f'{h.url}/{status}', **kw) for status in (400, 403, 500)]
    c.Quarantine(pages.folder, pages.vintage).add('lab', {'k': KEY}, f'unknown key {KEY}')
    shown = [str(a), repr(a), repr(a.headers), a.body.decode(), repr(client), repr(host), logged.getvalue(),
             *(x for e in errors for x in (str(e), repr(e), e.text, e.url, str(vars(e)), *traceback.format_exception(e), str(pickle.loads(pickle.dumps(e))))),
             *(p.read_bytes().decode(errors='replace') for p in pages.folder.rglob('*.*') if p.is_file()),
             *(pages.get(line['sha256']).decode() for line in pages.job('lab', 'page').lines)]
    assert told(*shown) == []
    assert 'HTTP Request: GET' in logged.getvalue() and 'bad key *** in ***' in errors[0].text

def test_no_key_no_parameter(serve, ask, monkeypatch):
    monkeypatch.delenv('LAB_KEY', raising=False)
    h = serve(Reply())
    client = ask({h.name: c.Host(key_env='LAB_KEY', key_param='api_key')})
    client.get(h.url)
    assert h.seen[0].params == {}
    for bad in ('tiny', 'schlüssel-lang', 'with\x07bell--'):
        monkeypatch.setenv('LAB_KEY', bad)
        with pytest.raises(DataError, match='environment variable LAB_KEY') as e: client.get(h.url)
        assert bad not in str(e.value)

@given(key=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=40), before=st.text(max_size=9))
@relaxed
def test_no_spelling_of_a_key_is_left(key, before):
    old = c._forms
    try:
        c.hide(key)
        spelt = [key, json.dumps(key), repr(key), quote(key, safe=''), str(httpx.URL('http://x', params={'k': key})), str(httpx.URL('http://x').copy_merge_params({'k': key}))]
        for s in spelt:
            assert key not in c.redact(before + s) or set(key) == {'*'}
            assert s.encode() in before.encode() or b'***' in c.redact((before + s).encode())
    finally: c._forms = old

def test_redirects_end(serve, ask):
    h = serve(Reply(status=302, headers={'Location': '/x'}))
    assert 'more than 10 redirects' in str(error(ask(), h.url))

# -- pages and journals

def fill(job, bodies, total=None):
    for i, b in enumerate(bodies): job.add(b, 'http://lab.org', {'i': i}, n=1, next=str(i + 1))
    if total is not None: job.finish(total)

@given(body=st.binary(max_size=3000))
@relaxed
def test_a_page_comes_back_as_it_was(body, pages):
    name = pages.put(body)
    assert name == hashlib.sha256(body).hexdigest() and pages.get(name) == body

@given(damage=st.data())
@relaxed
def test_any_damage_to_a_page_is_noticed(damage, pages):
    body = b'{"studies": []} '*50
    name = pages.put(body)
    raw = bytearray(pages.path(name).read_bytes())
    at = damage.draw(st.integers(0, len(raw) - 1))
    raw = raw[:at] if damage.draw(st.booleans()) else raw[:at] + bytes([raw[at] ^ damage.draw(st.integers(1, 255))]) + raw[at + 1:]
    pages.path(name).write_bytes(raw)
    try: assert pages.get(name) == body # a bit that says nothing
    except DataError as e: assert f'{name}.zst is damaged; delete it' in str(e) and '\n' not in str(e)
    assert pages.put(body) == name and pages.get(name) == body

def test_same_page_from_many_threads(pages):
    with c.Client(c.agent(None)) as client:
        assert len(set(client.map(lambda i: pages.put(b'the same'*10_000), range(40), workers=8))) == 1
    assert len(list((pages.folder/'pages').rglob('*.*'))) == 1

def test_a_journal_cut_at_any_byte_is_resumed(pages):
    "At each byte where a kill can cut the file: the whole lines before it count, and the end is as if nothing had happened."
    bodies = [b'one', 'zwölf'.encode(), b'']
    job = pages.job('lab', 'a/b ü')
    fill(job, bodies, total=3)
    raw = job.path.read_bytes()
    assert pages.jobs('lab') == ['a/b ü']
    for at in range(len(raw) + 1):
        job.path.write_bytes(raw[:at])
        again = pages.job('lab', 'a/b ü')
        assert len(again.lines) == min(3, raw[:at].count(b'\n')) and again.done == (at == len(raw))
        if at % 7 and at < len(raw): continue
        if not again.done: fill(again, bodies[len(again.lines):], total=3)
        last = pages.job('lab', 'a/b ü')
        assert [b for _, b in last.bodies()] == bodies and last.total == 3 and last.path.read_bytes().count(b'\n') == 4

def test_a_journal_damaged_in_the_middle_is_not_guessed_at(pages):
    job = pages.job('lab', 'x')
    fill(job, [b'1', b'2', b'3'])
    job.path.write_bytes(job.path.read_bytes().replace(b'"n"', b'"n', 1))
    with pytest.raises(DataError, match='x.jsonl line 1 is damaged; delete the file'): pages.job('lab', 'x')
    job.path.write_bytes(b'')
    fill(job := pages.job('lab', 'x'), [b'1', b'2'])
    with open(job.path, 'ab') as f: f.write(b'\0'*50 + b'\n') # what a power cut may leave
    assert len(pages.job('lab', 'x').lines) == 2

def test_two_writers_of_a_journal_are_noticed(pages):
    one, two = pages.job('lab', 'x'), pages.job('lab', 'x')
    fill(one, [b'1'])
    with pytest.raises(DataError, match='changed meanwhile'): fill(two, [b'2'])
    assert [b for _, b in pages.job('lab', 'x').bodies(partial=True)] == [b'1']

def test_a_deleted_page_is_fetched_again(pages):
    job = pages.job('lab', 'x')
    fill(job, [b'1', b'2', b'3'], total=3)
    raw = job.path.read_bytes()
    pages.path(job.lines[1]['sha256']).unlink()
    with pytest.raises(DataError, match='is missing; run the refresh again'): list(job.bodies())
    again = pages.job('lab', 'x')
    with pytest.raises(DataError, match='is missing, and lab job'): list(again.bodies(partial=True))
    assert job.path.read_bytes() == raw # reading changes nothing
    fill(again, [b'2', b'3'], total=3)
    assert [b for _, b in pages.job('lab', 'x').bodies()] == [b'1', b'2', b'3']

@pytest.mark.parametrize('what', ['page', 'journal'])
def test_a_full_disk_leaves_the_journal_true(what, pages):
    "A limit on file size stands for a full disk: the write is cut short, and the next one fails."
    job = pages.job('lab', 'x')
    fill(job, [b'1'])
    size = job.path.stat().st_size
    body = random.Random(1).randbytes(100_000) if what == 'page' else b'2'
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, old[1]))
    try:
        with pytest.raises(DataError, match='cannot write .* free some space') as e: fill(job, [body])
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert '\n' not in str(e.value) and job.path.stat().st_size == size and not list(pages.folder.rglob('.*.tmp'))
    fill(job, [body], total=2)
    assert [b for _, b in pages.job('lab', 'x').bodies()] == [b'1', body]

def test_odd_names_and_words(pages):
    for name in ('.', '..', 'x' * 200, 'AREA[Phase]PHASE3 & "q"/\\:*?', '試験'): fill(pages.job('lab', name), [b'1'])
    assert pages.jobs('lab') == sorted(['.', '..', 'x'*200, 'AREA[Phase]PHASE3 & "q"/\\:*?', '試験']) and pages.jobs('none') == []
    with pytest.raises(DataError, match='too long for a file name'): pages.job('lab', '試'*80)
    q = c.Quarantine(pages.folder, pages.vintage)
    for bad in ('line\u2028sep', '\ud800', 'nul\0', 'tab\t\n'): q.add('lab', bad, f'unknown {bad!r}')
    assert len(q.records()) == q.n == 4 and q.records().record.tolist()[0] == 'line\u2028sep'
    c.Quarantine(pages.folder, pages.vintage, ['other'])
    assert len(c.Quarantine(pages.folder, pages.vintage, ()).records()) == 4 and len(c.Quarantine(pages.folder, pages.vintage, ['lab']).records()) == 0

# -- kill -9

NURSERY = ''' # forks a child a line of input, so that twenty kills do not cost twenty imports
import json, os, signal, sys
from clinical_rl import core
from clinical_rl.sources import client as c

def kill_at(line): # the child kills itself before the line-th line it runs of what writes to the disk
    left, writing = [line], {f.__code__ for f in (core.atomic_write, c.Pages.put, c.Job._append, c.Job.add, c.Job.finish)}
    def each(frame, event, arg):
        if event == 'line':
            left[0] -= 1
            if not left[0]: os.kill(os.getpid(), signal.SIGKILL)
        return each
    sys.settrace(lambda frame, event, arg: each if frame.f_code in writing else None)

def fetch(folder, url, line):
    with c.Client(c.agent('ada@lab.org'), {'127.0.0.1': c.Host(per_second=1e6)}) as client, c.one_refresh(folder):
        if line: kill_at(line)
        job = c.Pages(folder, 'v1').job('lab', 'all')
        while not job.done:
            if job.lines and job.lines[-1]['next'] is None: job.finish(sum(l['n'] for l in job.lines)); break
            params = {'token': job.lines[-1]['next'] if job.lines else None}
            a = client.get(url, params, check=json.loads)
            d = json.loads(a.body)
            job.add(a.body, a.url, params, n=len(d['records']), next=d.get('next'))

for order in sys.stdin:
    pid = os.fork()
    if not pid:
        try: fetch(*json.loads(order)); os._exit(0)
        except BaseException as e: print(e, file=sys.stderr, flush=True); os._exit(1)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''

@pytest.fixture(scope='module')
def nursery():
    p = subprocess.Popen([sys.executable, '-c', NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         env=os.environ | {'NO_PROXY': '127.0.0.1', 'no_proxy': '127.0.0.1'})
    def start(folder, url, line=0):
        print(json.dumps([str(folder), url, line]), file=p.stdin, flush=True)
        return int(p.stdout.readline())
    start.end = lambda: int(p.stdout.readline())
    yield start
    p.stdin.close(); p.wait()

RECORDS = [[f'NCT{100*i + j:08d} ' + random.Random(i).randbytes(2000).hex() for j in range(3)] if i % 5 != 3 else [] for i in range(50)]

def whole(folder): # the records that a parse would see
    job = c.Pages(folder, 'v1').job('lab', 'all')
    got = [r for _, b in job.bodies() for r in json.loads(b)['records']]
    assert got == [r for page in RECORDS for r in page] and job.total == len(got), 'lost or doubled'
    assert not list(folder.rglob('.*.tmp'))
    return [{k: v for k, v in line.items() if k != 'time'} for line in job.lines]

def test_killed_at_any_line_of_code_and_resumed(nursery, tmp_path, serve):
    "A kill inside a write, a rename, a journal line: each try goes a random way and dies, the next goes on."
    h, dice = serve(paged(RECORDS)), random.Random(42)
    nursery(tmp_path/'calm', h.url); assert nursery.end() == 0
    for _ in range(20):
        nursery(tmp_path/'rough', h.url, dice.randint(1, 70))
        assert nursery.end() == -signal.SIGKILL
    nursery(tmp_path/'rough', h.url); assert nursery.end() == 0
    assert whole(tmp_path/'rough') == whole(tmp_path/'calm')

def test_killed_at_any_time_and_resumed(nursery, tmp_path, serve):
    "From outside, at a random moment after a random number of requests, twenty times."
    dice, go, gone = random.Random(7), threading.Event(), threading.Event()
    serve_page, want = paged(RECORDS), [0]
    def script(seen):
        if len(h.seen) >= want[0]: go.set()
        if len(h.seen) > want[0]: gone.wait(600) # nobody gets so far as to end before it is killed
        return serve_page(seen)
    h = serve(script)
    for _ in range(20):
        go.clear(); gone.clear()
        want[0] = len(h.seen) + dice.randint(1, 2)
        pid = nursery(tmp_path, h.url)
        assert go.wait(600)
        time.sleep(dice.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert nursery.end() == -signal.SIGKILL
        gone.set()
    want[0] = 1e9
    nursery(tmp_path, h.url); assert nursery.end() == 0
    whole(tmp_path)

# -- one at a time

HOLDER = '''
import sys
from clinical_rl.sources.client import one_refresh
with one_refresh(sys.argv[1]): print('held', flush=True); sys.stdin.read()
'''

def test_a_second_refresh_says_who_holds_or_waits(tmp_path, monkeypatch):
    p = subprocess.Popen([sys.executable, '-c', HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline() == 'held\n'
    with pytest.raises(DataError, match=f'lock: process {p.pid} on .* since .* is refreshing; wait until it ends'):
        with c.one_refresh(tmp_path): pass
    class Heard(io.StringIO):
        def flush(self): heard.set()
    heard, held, err = threading.Event(), threading.Event(), Heard()
    monkeypatch.setattr(sys, 'stderr', err)
    def second():
        with c.one_refresh(tmp_path, wait=True): held.set()
    t = threading.Thread(target=second); t.start()
    assert heard.wait(300) and f'waiting for process {p.pid}' in err.getvalue() and not held.is_set()
    p.kill(); p.wait() # the kernel lets go, however it ends
    t.join(300)
    assert held.is_set()
    half = tmp_path/'pages'/'ab'/'.abcd.zst.1.tmp' # of a run that was killed
    half.parent.mkdir(parents=True); half.touch()
    with c.one_refresh(tmp_path): assert not half.exists()
