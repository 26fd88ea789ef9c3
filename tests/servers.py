"A local host that answers by a script, faults and all."
import gzip, json, socket, struct, threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

@dataclass
class Reply:
    "One answer; `cut` sends so many bytes of the body and breaks off."
    body: bytes = b'{"ok": true}'
    status: int = 200
    headers: dict = field(default_factory=dict)
    cut: int|None = None
    reset: bool = False   # break off with a reset, not with an end
    chunked: bool = False # without a length
    hang: bool = False    # say nothing until the host is closed

def gzipped(body, cut=None, spoil=False):
    "A compressed answer of the right length; cut short or spoiled before it was sent."
    z = bytearray(gzip.compress(body))
    if spoil: z[len(z)//2] ^= 0xff
    return Reply(bytes(z[:cut]), headers={'Content-Encoding': 'gzip'})

@dataclass
class Seen:
    path: str
    params: dict
    headers: dict
    connection: int

class Host:
    "A context manager. `script`: replies in order (the last one again and again), or a function of what was asked."
    def __init__(self, *script): self.script, self.seen, self.under_way, self.most = list(script), [], 0, 0

    def __enter__(self):
        host, self.lock, self.closing = self, threading.Lock(), threading.Event()
        class Handler(BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'
            disable_nagle_algorithm = True
            def log_message(self, *_): pass
            def do_GET(self): host.answer(self)
        class Server(ThreadingHTTPServer):
            def handle_error(self, *_): pass # a client that was killed
        self.server = Server(('127.0.0.1', 0), Handler)
        self.name = f'127.0.0.1:{self.server.server_port}'
        self.url = f'http://{self.name}'
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def reply(self, seen):
        if callable(self.script[0]): return self.script[0](seen)
        with self.lock: return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def answer(self, h):
        at = urlsplit(h.path)
        seen = Seen(at.path, {k: v[0] for k, v in parse_qs(at.query).items()}, dict(h.headers), h.client_address[1])
        with self.lock:
            self.seen.append(seen)
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try: self.send(h, self.reply(seen))
        finally:
            with self.lock: self.under_way -= 1

    def send(self, h, r):
        if r.hang: self.closing.wait(600); h.close_connection = True; return
        h.send_response(r.status)
        for k, v in r.headers.items(): h.send_header(k, v)
        h.send_header(*(('Transfer-Encoding', 'chunked') if r.chunked else ('Content-Length', str(len(r.body)))))
        h.end_headers()
        body = r.body[:r.cut]
        h.wfile.write(b'%x\r\n%s\r\n' % (len(body), body) if r.chunked else body)
        if r.cut is None: h.wfile.write(b'0\r\n\r\n' if r.chunked else b''); return
        h.close_connection = True
        if r.reset: h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); h.connection.close()

def paged(pages):
    "A script that serves `pages` (lists of records) one after the other, as `?token=`."
    def script(seen):
        i = int(seen.params.get('token', 0))
        return Reply(json.dumps({'records': pages[i]} | ({'next': str(i + 1)} if i + 1 < len(pages) else {})).encode())
    return script
