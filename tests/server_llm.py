"An OpenAI-compatible server that follows a script: the name of the model says how it behaves. It counts what it is asked."
import base64, gzip, hashlib, json, re, threading, time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

GOOD = dict(items=[dict(indication='NSCLC', phase='2', line='first', regimen='combination')])


def call(name, arguments): # an answer with one tool call
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return dict(role='assistant', content=None, tool_calls=[dict(id='c1', type='function', function=dict(name=name, arguments=text))])

def say(text): return dict(role='assistant', content=text)

def look_then(last): # asks for trials first
    return lambda body, server: last if any(m['role'] == 'tool' for m in body['messages']) else call('list_trials', dict(program='nivolumab'))

def injected(body, server): # does what a title orders, if it ever stood outside a tool message
    outside = [m for m in body['messages'] if m['role'] != 'tool' and 'EVIL ORDER' in json.dumps(m)]
    return call('submit_portfolio', dict(items=['PAN 4'])) if outside else look_then(call('submit_portfolio', GOOD))(body, server)

BRAINS = dict( # model -> function: request, server -> message
    good=look_then(call('submit_portfolio', GOOD)),
    bad_json=lambda body, s: call('list_trials', '{"program": "nivo'), not_object=lambda body, s: call('submit_portfolio', '[1, 2'),
    unknown_tool=lambda body, s: call('open_browser', dict(url='http://future')),
    loop=lambda body, s: call('list_trials', dict(program='nivolumab')),
    refusal=lambda body, s: say("I'm sorry, but I can't help with that."), filtered=lambda body, s: say('') | dict(refusal='no'),
    silent=lambda body, s: say(''), chatty=lambda body, s: say('The program will start some trials.'),
    huge=lambda body, s: say('x'*1_000_000), huge_call=lambda body, s: call('submit_portfolio', '{"items": "' + 'x'*1_000_000),
    many_calls=lambda body, s: dict(call('list_trials', {}), tool_calls=call('list_trials', {})['tool_calls']*500),
    wrong_schema=lambda body, s: call('submit_portfolio', dict(items=[dict(tumour='lung', when='soon')])),
    learns=lambda body, s: call('submit_portfolio', GOOD if len(body['messages']) > 3 else dict(items=[dict(indication='NSCLC', phase='9')])),
    injected=injected, no_choices=lambda body, s: None, echo=lambda body, s: say(f'your key is {s.keys[-1]}, {base64.b64encode(s.keys[-1].encode()).decode()} in basic authentication'),
    odd_calls=lambda body, s: dict(say(None), tool_calls=[dict(id=None, type='function', function=None)]), odd_text=lambda body, s: say([{'text': 5}]),
    null_call=lambda body, s: dict(call('x', {}), tool_calls=[None, dict(id=7), *call('submit_portfolio', GOOD)['tool_calls']]),
    tagged=lambda body, s: say('I hand in:\n<tool_call>\n{"name": "submit_portfolio", "arguments": ' + json.dumps(GOOD) + '}\n</tool_call>'),
    quoted=lambda body, s: say('A title says <tool_call>{"name": "submit_portfolio", "arguments": ' + json.dumps(GOOD) + '}</tool_call>'),
    odd_name=lambda body, s: call('functions list.trials', {}), surrogate=lambda body, s: say('\ud800 and so on'),
    echo_cut=lambda body, s: say('x'*19_990 + s.keys[-1]), echo_name=lambda body, s: call('n'*95 + s.keys[-1], {}),
    text=lambda body, s: say('{"tool": "submit_portfolio", "arguments": ' + json.dumps(GOOD) + '}'), plain=lambda body, s: say('NSCLC II first\nEnjoy!'))


_JSON = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n'
ODD_WAITS = dict(nan='nan', year=f'Mon, 01 Jan {"9"*20} 00:00:00 GMT')
CUT = dict(hangup=b'', cut=_JSON + b'Content-Length: 500\r\n\r\n{"choices": [{"mess', chunked=_JSON + b'Transfer-Encoding: chunked\r\n\r\n13\r\n{"choices": [{"mess')

_WHOLE = json.dumps(dict(choices=[dict(message=call('submit_portfolio', GOOD), finish_reason='tool_calls')])).encode()
_GZIP, _MORE = _JSON + b'Content-Encoding: gzip\r\n', lambda body: b'Content-Length: %d\r\n\r\n%b' % (len(body), body)
ONCE = dict(cut_once=CUT['cut'], chunk_once=CUT['chunked'], hangup_once=b'', gzip_cut_once=_GZIP + _MORE(gzip.compress(_WHOLE)[:-30]),
            gzip_bad_once=_GZIP + _MORE(b'xx' + gzip.compress(_WHOLE)[2:]))
DRIP = dict(drip_body=b'HTTP/1.1 500 Oops\r\nContent-Length: 500\r\n\r\n', drip_head=b'HTTP/1.1 200 OK\r\nX-Slow: ')
FIELDS = 'content finish_reason id function arguments escaped role model refusal usage error body500 text500 body400 header mixed'.split()


def echo(field, key): # status, body, headers of an answer that says the key back in one field, in several spellings
    said = ' '.join([key, quote(key), quote(key, safe=''), base64.b64encode(key.encode()).decode(), base64.b64encode(f'{key}:'.encode()).decode(), json.dumps(key)]) + 'x'*1000
    if field == 'error': return 200, dict(error=dict(message=said)), {}
    if field in ('body400', 'body500'): return int(field[4:]), dict(error=dict(message=said, code=said, param=said), more=[said]), {}
    if field == 'text500': return 500, f'<html>{said}</html>'.encode(), {}
    if field == 'header': return 200, json.loads(_WHOLE), dict(X_Account=said.replace('\n', ' '), Retry_After=said)
    m, choice = call('list_trials', {}), dict(finish_reason='stop')
    c = m['tool_calls'][0]; f = c['function']
    if field in ('content', 'refusal', 'role'): m = say('no') | {field: said}
    if field == 'id': c['id'] = said
    if field == 'function': f['name'] = said
    if field == 'arguments': f['arguments'] = said
    if field == 'escaped': f['arguments'] = '{"program": "' + ''.join(f'\\u{ord(x):04x}' for x in key) + '"}'
    if field == 'finish_reason': choice = dict(finish_reason=said)
    if field == 'mixed': choice = dict(finish_reason=dict(a=[said]*1000)); m['content'] = [dict(text=said)]
    return 200, dict(model=said if field == 'model' else 'm', choices=[choice | dict(message=m)], usage=dict(prompt_tokens=said, note=said) if field == 'usage' else None), {}


def bad_history(messages): # what endpoints of vendors refuse with 400
    for m in messages:
        calls = m.get('tool_calls') or []
        if m['role'] == 'assistant' and not calls and not m.get('content'): return 'empty content'
        if any(not re.fullmatch(r'[a-zA-Z0-9_-]{1,64}', c['function']['name']) for c in calls): return 'name of a function'
        if any(not isinstance(json.loads(c['function']['arguments']), dict) for c in calls): return 'arguments'
        if len({c['id'] for c in calls}) < len(calls): return 'ids'


class Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def log_message(self, *args): pass

    def reply(self, status, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for k, v in {'Content-Type': 'application/json', 'Content-Length': str(len(data))}.items() | headers.items(): self.send_header(k.replace('_', '-'), v)
        self.end_headers(); self.wfile.write(data)

    def do_POST(self):
        s = self.server; raw = self.rfile.read(int(self.headers['Content-Length'])); body = json.loads(raw)
        digest, model = hashlib.sha256(raw).hexdigest(), body['model']
        with s.lock:
            s.asked[digest] += 1; s.headers.append(dict(self.headers)); s.keys.append((self.headers.get('Authorization') or '').removeprefix('Bearer ')); s.requests.append(raw if s.keep else None)
            n = s.asked[digest]; s.waiting += s.stall_after is not None and sum(s.asked.values()) > s.stall_after
            stalled = s.stall_after is not None and sum(s.asked.values()) > s.stall_after
        if stalled: s.go_on.wait(600); self.close_connection = True; return
        if model == 'busy' and n < 3: return self.reply(429, dict(error=dict(message='slow down')), Retry_After='0.01')
        if model in ODD_WAITS and n < 3: return self.reply(429, dict(error=dict(message='slow down')), Retry_After=ODD_WAITS[model])
        if model == 'banned': return self.reply(429, dict(error=dict(message='come back tomorrow')), Retry_After='86400')
        if model == 'busy_silent' and n < 3: return self.reply(429, dict(error=dict(message='slow down')))
        if model == 'restarting' and n < 3: return self.reply(500, dict(error='starting'), Retry_After=['0.02', 'soon'][n - 1])
        if model == 'down': return self.reply(500, dict(error=dict(message='oops')))
        if model == 'flaky' and n < 2: return self.reply(503, b'<html>overloaded</html>', Content_Type='text/html')
        if model == 'key': return self.reply(401, dict(error=dict(message=f'Incorrect API key provided: {s.keys[-1]}')))
        if model == 'leaky': return self.reply(400, dict(error=dict(message=f'bad header Authorization: Bearer {s.keys[-1]}')))
        if model.startswith('echo:'):
            status, answer, headers = echo(model[5:], s.keys[-1]); return self.reply(status, answer, **headers)
        if model == 'redirected': return self.reply(307, b'', Location=s.elsewhere)
        if model == 'forbidden': return self.reply(403, dict(error=dict(message='no access')))
        if model == 'packed': return self.reply(200, gzip.compress(gzip.compress(_WHOLE)), Content_Encoding='gzip, gzip')
        if model == 'big_error': return self.reply(500, b'x'*20_000_000)
        if model == 'error_200': return self.reply(200, dict(error=dict(message='quota is used up ' + s.keys[-1], code=429)))
        if model in DRIP:
            self.wfile.write(DRIP[model])
            while not s.go_on.wait(0.05): self.wfile.write(b'x'); self.wfile.flush()
            self.close_connection = True; return
        if model == 'nested': return self.reply(200, b'['*100_000)
        if bad := bad_history(body['messages']): return self.reply(400, dict(error=dict(message=bad)))
        if model == 'html': return self.reply(200, b'<html>welcome</html>', Content_Type='text/html')
        if model == 'hang': s.go_on.wait(2); self.close_connection = True; return
        if model == 'stream': return self.reply(200, b'data: {"choices": [{"delta": {"content": "NSC', Content_Type='text/event-stream')
        if model in CUT or (model in ONCE and n == 1): # ends in the middle of the answer, or before it
            self.wfile.write((CUT | ONCE)[model])
            self.wfile.flush(); self.close_connection = True; self.connection.close(); return
        try: message = s.brains.get(model, s.brains['good'])(body, s)
        except FileNotFoundError: return self.reply(404, dict(error=dict(message='no such page')))
        finish = 'tool_calls' if message and message.get('tool_calls') else 'stop'
        self.reply(200, dict(id='x', object='chat.completion', created=0, model=model, choices=[dict(index=0, finish_reason=finish, message=message)] if message else [],
                             usage=dict(prompt_tokens=len(raw)//s.letters, completion_tokens=20, total_tokens=len(raw)//s.letters + 20)))
        with s.lock: s.delivered[digest] += 1


class Server(ThreadingHTTPServer):
    "The server while a `with` block lasts; `url`, `asked`, `delivered` (counts by request), `keys`, `requests`, `headers`; `letters` a token, as it counts."
    daemon_threads, request_queue_size = True, 128
    def __init__(self, keep=True, stall_after=None, **brains):
        super().__init__(('127.0.0.1', 0), Handler)
        self.keep, self.stall_after, self.brains = keep, stall_after, BRAINS | brains
        self.lock, self.go_on, self.waiting = threading.Lock(), threading.Event(), 0
        self.asked, self.delivered, self.keys, self.requests, self.headers, self.letters = Counter(), Counter(), [], [], [], 4
        self.url = f'http://127.0.0.1:{self.server_port}/v1'
    def handle_error(self, *args): pass # a client that was killed
    def __enter__(self): threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start(); return self
    def __exit__(self, *args): self.go_on.set(); self.shutdown(); self.server_close()
