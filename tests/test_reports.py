"""Reports: built from made-up executed notebooks, broken on purpose, and looked at in a real browser.

The browser is Debian's chromium, steered through its DevTools port, so that a page is measured exactly as it is shipped: at the
widths of a laptop and a phone, with every request and every console message recorded.
"""
import base64, hashlib, json, os, re, shutil, subprocess, tempfile, time, urllib.parse, urllib.request
from functools import cache
from io import BytesIO
from pathlib import Path

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt
import nbformat.v4 as v4
import numpy as np
import pandas as pd
import pytest

from conftest import until
from clinical_rl import report
from clinical_rl.core import DataError, load_params, write_parquet

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = {'laptop': (1280, 800), 'phone': (390, 844)}

# ---------------------------------------------------------------- a made-up project
@cache
def png(seed=0, size=(5.8, 3.4)):
    "A small real figure in base64."
    report.use_style()
    x = np.arange(2005, 2026)
    fig, ax = plt.subplots(figsize=size)
    for i, name in enumerate(['registered', 'approved', 'reported']):
        ax.plot(x, np.random.default_rng(seed + i).integers(5, 60, len(x)).cumsum(), label=name)
    ax.set(xlabel='year', ylabel='records', title='Records grow every year', xticks=x[::5]); ax.legend()
    buf = BytesIO(); fig.savefig(buf, format='png'); plt.close(fig)
    return base64.b64encode(buf.getvalue()).decode()

def show_html(h): return v4.new_output('display_data', data={'text/html': h, 'text/plain': '<HTML>'})
def show_png(b): return v4.new_output('display_data', data={'image/png': b, 'text/plain': '<Figure size 640x380 with 1 Axes>'})
def show_caption(t): return show_html(f'<p class="caption" style="font-style:italic">{t}</p>')

def notebook(title, seed=0, hard=True):
    "An executed stage notebook with all that a page must cope with."
    wide = pd.DataFrame({f'quite long column {i}': np.random.default_rng(i).normal(size=4) for i in range(14)})
    wide.insert(0, 'drug', ['pembrolizumab', 'nivolumab', 'trastuzumab deruxtecan', 'X'])
    long = pd.DataFrame(dict(year=range(1960, 2020), trials=range(0, 60_000, 1000)))
    raw = pd.DataFrame(np.arange(60).reshape(3, 20), columns=[f'unstyled_{i}' for i in range(20)])
    md = (f'# {title}\n> What this stage does, in a sentence\n\n'
          f'Prompts are weighted by $w_i = \\exp((R_i - \\bar R)/T)$ and `clipped`. A long word: {"x"*120}\n\n'
          r'$$\mathcal{L}(\theta) = -\sum_{i=1}^{N} w_i \sum_{t} \log \pi_\theta(y_{i,t} \mid y_{i,<t}, s_i) + '
          r'\lambda \lVert \theta \rVert^2 + \alpha + \beta + \gamma + \delta + \epsilon$$'
          '\n\n## By year\n\n- one\n- two\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n')
    cells = [v4.new_markdown_cell(md), v4.new_code_cell("method = 'secret_parameter'", metadata=dict(tags=['parameters'])),
             v4.new_code_cell('import pandas as pd'),
             v4.new_code_cell('plot(' + 'records, '*40 + ')', outputs=[
                 v4.new_output('stream', name='stderr', text='a warning\n'),
                 v4.new_output('execute_result', data={'text/plain': '<Axes: >'}),
                 show_png(png(seed % 3)), show_caption('Records grow in every year; <strong>2025</strong> is the largest.')])]
    if hard:
        cells += [v4.new_code_cell('plot_wide()', outputs=[show_caption('A wide figure, its caption first.'),
                                                             show_png(png(0, (9.5, 3)))]),
                  v4.new_code_cell('tables()', outputs=[
                      show_html(report.table_html(wide, 'A wide table', units={'quite long column 0': 'USD m'})),
                      show_html(report.table_html(long, 'A long table')), show_html(raw._repr_html_()),
                      v4.new_output('stream', name='stdout', text='printed ' + 'word '*60 + '\n')]),
                  v4.new_markdown_cell('## Limits\nA heading that other sections have too.\n\n### Detail\nText.'),
                  v4.new_code_cell('bare()', outputs=[show_png(png())])]
    return v4.new_notebook(cells=cells)

def results():
    "results.csv and comparisons.csv as `evaluate` writes them: four item policies on each split, a text policy on temporal."
    f1 = {(m, '', ''): v for m, v in dict(empty=0, last_window=.489, frequency=.518, class_prior=.41, nearest=.50, logistic=.58, boosting=.582, average=.581).items()}
    f1 |= {('policy', 'items', o): .585 for o in ('bc', 'rw_bc', 'lr_bc', 'iql')} | {('policy', 'features', 'bc'): .583, ('policy', 'text', 'bc'): .47}
    rows, diffs = [], []
    for scope, split in report.HEADLINE:
        for m, v in f1.items():
            if m[0] == 'policy' and (scope == 'sponsor' or (m[1], split) == ('text', 'drug')): continue
            key, programs = [*m, 'expected_f1', 0, 1], 45 if split == 'temporal' else 9
            for metric, share in dict(indication_f1=1, indication_phase_f1=.6, strict_f1=.2, soft_f1=.8).items():
                x = v*share*(1 if scope == 'landscape' else .7)
                rows.append([scope, split, *key, 7, 295, programs, metric, x, max(x - .05, 0), x + .05])
                rivals = [('chosen', 'logistic', .58)]*(m[0] != 'logistic') + [('bc', 'bc', .585)]*(m[2] not in ('', 'bc')) + [('parts', 'features', .583)]*(m[1:] == ('items', 'bc'))
                for against, name, w in rivals:
                    d = (v - w)*share
                    diffs.append([scope, split, metric, *key, against, name, d, d - .04, d + .04, 'primary' if (m[1], against) == ('items', 'chosen') else 'exploratory',
                                  'higher' if d > .04 else 'lower' if d < -.04 else 'noise'])
    return pd.DataFrame(rows, columns=report.RESULT_COLUMNS), pd.DataFrame(diffs, columns=report.COMPARISON_COLUMNS)

def make_project(base):
    "A project folder with all that the report stage reads."
    base = Path(base)
    shutil.copytree(ROOT/'templates', base/'templates')
    for f in ('params.yaml', 'settings.ini'): shutil.copy(ROOT/f, base/f)
    (base/'data.dvc').write_text('outs:\n- md5: 0123456789abcdef0123456789abcdef.dir\n  path: data\n')
    nbs = base/'out'/'notebooks'; nbs.mkdir(parents=True)
    params = load_params(base/'params.yaml')
    runs = [r for p in report.PAGES for s in p['stages'] for r in report.run_names(s, params)]
    for i, r in enumerate(runs):
        nb = notebook(r.split('-')[0].replace('_', ' ').capitalize(), i, hard=i < 3 or i > len(runs) - 3)
        (nbs/f'{r}.ipynb').write_text(json.dumps(nb))
    for k in report.KINDS:
        write_parquet(pd.DataFrame(dict(record_id=[f'{k}{i}' for i in range(7)])), base/'out'/'records'/f'{k}.parquet')
    write_parquet(pd.DataFrame(dict(scope=['landscape']*5 + ['sponsor']*2)), base/'out'/'episodes'/'episodes.parquet')
    pd.DataFrame(dict(drug=['a', 'b'])).to_csv(base/'out'/'episodes'/'programs.csv', index=False)
    pd.DataFrame(dict(field=['indication', 'indication', 'phase'], part=['dev', 'test', 'test'], n=[150, 160, 160],
                      accuracy=[1, .975, 1])).to_csv(
        base/'out'/'mapper_accuracy.csv', index=False)
    (base/'reports'/'metrics').mkdir(parents=True)
    for name, t in zip(('results', 'comparisons'), results()): t.to_csv(base/'reports'/'metrics'/f'{name}.csv', index=False)
    return base

def digest(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).rglob('*')) if p.is_file()}

@pytest.fixture(scope='module')
def project(tmp_path_factory):
    base = make_project(tmp_path_factory.mktemp('project'))
    report.build_reports(base)
    return base

@pytest.fixture
def broken(project, tmp_path):
    "A copy of the built project, to be broken."
    return shutil.copytree(project, tmp_path/'copy')

# ---------------------------------------------------------------- building
def test_all_pages_and_metrics(project):
    assert {p.name for p in (project/'reports').glob('*.html')} == {p['file'] for p in report.PAGES}
    data = json.loads((project/'reports'/'metrics'/'data.json').read_text())
    assert data == dict(records={k: 7 for k in report.KINDS}, programs=2, windows=dict(sponsor=2, landscape=5),
                        mapper=dict(indication_accuracy=.975, n_labelled=310))

def test_second_build_is_byte_identical(project):
    before = digest(project/'reports')
    report.build_reports(project)
    assert digest(project/'reports') == before

def test_page_content(project):
    page = (project/'reports'/'baselines.html').read_text()
    assert 'secret_parameter' not in page, 'parameters cells stay out'
    assert 'a warning' not in page and '&lt;Axes' not in page
    assert '<math' in page and '\\mathcal' not in re.sub(r'<annotation.*?</annotation>', '', page), 'formulas are set'
    assert 'Baseline: logistic' in page and 'Baseline: last_window' in page
    assert '0123456789abcdef' in page and hashlib.sha256((project/'params.yaml').read_bytes()).hexdigest() in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids)), 'no id twice'
    levels = [int(x) for x in re.findall(r'<h([1-6])\b', page)]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b <= a + 1 for a, b in zip(levels, levels[1:])), 'headings in order'

def test_front_page_says_what_the_table_says(project):
    page = report.plain((project/'reports'/'index.html').read_text())
    assert 'The comparison baseline is Logistic classifier with 58.0 [53.0, 63.0] % indication F1.' in page
    assert 'No item policy beats it, after Holm’s correction: all differences are noise' in page
    assert 'worse: BC policy (text) −11.0 points [−15.0, −7.0].' in page
    assert 'Only 9 programs, so the permutation test decides.' in page
    table = report.plain(re.search(r'<div class="table-box headline".*?</table>', (project/'reports'/'index.html').read_text(), re.S)[0])
    assert all(w in table for w in ('BC policy (items)', 'IQL policy (items)', 'BC policy (text)', 'Boosted classifier best baseline, in hindsight'))
    assert 'no model' not in table and 'Class prior' not in table, 'the rest is on the results page'

def test_runs_follow_the_parameters():
    p = load_params(ROOT/'params.yaml'); items, text, seed = p.policies.items, p.policies.text, p.policies.seeds[0]
    names = report.run_names('items', p)
    assert len(names) == len(items.scopes)*len(items.splits)*len(p.policies.seeds) and names[0] == f'items-{items.scopes[0]}-{items.splits[0]}-{seed}'
    assert report.run_names('train', p)[0] == f'train-{text.scopes[0]}-{text.splits[0]}-{text.objectives[0]}-{seed}'
    assert report.run_names('policies', p)[0] == f'policies-{text.scopes[0]}-{text.splits[0]}-{seed}'
    assert [report.run_names(s, p) for s in ('anchor', 'select')] == [['anchor'], ['select']]

def test_partial_run_names_what_is_missing(broken):
    gone = report.run_names('items', load_params(broken/'params.yaml'))[-1]
    (broken/'out'/'notebooks'/f'{gone}.ipynb').unlink()
    with pytest.raises(DataError, match='stage items has not run; run `dvc repro`'): report.build_reports(broken)
    (broken/'params.yaml').write_text((broken/'params.yaml').read_text().replace('partial: false', 'partial: true'))
    report.build_reports(broken)
    assert f'Not run yet: {gone}.' in report.plain((broken/'reports'/'training.html').read_text())

@pytest.mark.parametrize('break_it, message', [
    (lambda b: (b/'out'/'notebooks'/'rewards.ipynb').unlink(), 'stage rewards has not run; run `dvc repro`'),
    (lambda b: [p.unlink() for p in (b/'out'/'notebooks').glob('baseline-*')], 'stage baseline has not run; run `dvc repro`'),
    (lambda b: next((b/'out'/'notebooks').glob('train-*.ipynb')).write_text('{"cells": ['), '.ipynb is not a notebook'),
    (lambda b: (b/'reports'/'metrics'/'results.csv').unlink(), 'results.csv is missing: stage evaluate has not run'),
    (lambda b: (b/'reports'/'metrics'/'results.csv').write_text('scope,split\na,b\n'), "results.csv: column 'method' is missing"),
    (lambda b: (b/'data.dvc').write_text('outs: []\n'), 'data.dvc is missing or holds no md5'),
    (lambda b: (b/'out'/'records'/'filings.parquet').write_bytes(b'PAR1'), 'filings.parquet is damaged'),
    (lambda b: (b/'out'/'mapper_accuracy.csv').write_text('field,part,n,accuracy\n'), 'no row of field indication, part test'),
])
def test_failure_names_the_remedy_and_keeps_the_old_reports(broken, break_it, message):
    break_it(broken)
    before = digest(broken/'reports')
    with pytest.raises(DataError) as e: report.build_reports(broken)
    assert message in str(e.value) and '\n' not in str(e.value)
    assert digest(broken/'reports') == before

def test_too_large_names_the_largest_figure(broken):
    before = digest(broken/'reports')
    with pytest.raises(DataError, match=r'the largest figure is on \w+\.html \(\d+ KiB\): '):
        report.build_reports(broken, max_bytes=10_000)
    assert digest(broken/'reports') == before

# ---------------------------------------------------------------- the browser
class Browser:
    "Chromium without a window, steered through DevTools."
    def __init__(self, exe):
        self.dir = tempfile.mkdtemp(prefix='chromium-')
        self.proc = subprocess.Popen([exe, '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run',
            '--disable-background-networking', '--disable-component-update', '--disable-sync', '--disable-dev-shm-usage',
            '--hide-scrollbars',
            '--remote-debugging-port=0', '--remote-allow-origins=*', f'--user-data-dir={self.dir}', 'about:blank'],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port, end = Path(self.dir)/'DevToolsActivePort', time.time() + 300
        while not (port.exists() and port.read_text().count('\n')):
            if time.time() > end or self.proc.poll() is not None: raise RuntimeError('chromium did not start')
            time.sleep(.1)
        import websocket
        n = port.read_text().split()[0]
        tab = until(lambda: next((t for t in json.load(urllib.request.urlopen(f'http://127.0.0.1:{n}/json')) if t['type'] == 'page'), None))
        self.ws, self.n, self.events = websocket.create_connection(tab['webSocketDebuggerUrl'], timeout=300), 0, []
        for d in ('Page', 'Network', 'Log', 'Runtime'): self('%s.enable' % d)
        self('Network.setBlockedURLs', urls=['http://*', 'https://*']) # seen, but not let out

    def __call__(self, method, **params):
        self.n += 1
        self.ws.send(json.dumps(dict(id=self.n, method=method, params=params)))
        while (m := json.loads(self.ws.recv())).get('id') != self.n: self.events.append(m)
        if 'error' in m: raise RuntimeError(f'{method}: {m["error"]["message"]}')
        return m['result']

    def open(self, path, width, height, dark=False):
        "Load a page and wait until its images are decoded."
        self('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value='dark' if dark else 'light')])
        self.events.clear()
        url, end = Path(path).resolve().as_uri(), time.time() + 300
        loader = self('Page.navigate', url=url)['loaderId']
        self('Page.setLifecycleEventsEnabled', enabled=True)
        def done(e):
            return e.get('method') == 'Page.lifecycleEvent' and (e['params']['name'], e['params']['loaderId']) == ('load', loader)
        while not any(map(done, self.events)):
            if time.time() > end: raise RuntimeError(f'{path} did not load')
            time.sleep(.02); self.eval('1')
        self.eval('Promise.all([...document.images].map(i => i.decode().catch(() => 0))).then(() => 1)')

    def eval(self, js):
        r = self('Runtime.evaluate', expression=js, returnByValue=True, awaitPromise=True)
        if 'exceptionDetails' in r: raise RuntimeError(r['exceptionDetails'])
        return r['result'].get('value')

    def shot(self, path, full=False, clip=None):
        "Screenshot of the visible part, of the whole page, or of (x, y, width, height)."
        kw = {}
        if full: clip = (0, 0, *self.eval('[document.documentElement.clientWidth, document.documentElement.scrollHeight]'))
        if clip: kw = dict(clip=dict(zip(('x', 'y', 'width', 'height', 'scale'), (*clip, 1))), captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(self('Page.captureScreenshot', **kw)['data']))

    def close(self):
        self.ws.close(); self.proc.terminate()
        try: self.proc.wait(20)
        except subprocess.TimeoutExpired: self.proc.kill(); self.proc.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

@pytest.fixture(scope='module')
def browser():
    exe = shutil.which('chromium') or shutil.which('chromium-browser')
    if not exe:
        text = 'NO BROWSER: reports were not looked at. Install it: apt-get install -y chromium'
        (pytest.fail if os.environ.get('CI') else pytest.skip)(text)
    b = Browser(exe)
    yield b
    b.close()

@pytest.fixture
def page(request, project):
    kind, file = request.param
    return (project if kind == 'made_up' else ROOT)/'reports'/file

each_page = pytest.mark.parametrize('page', [pytest.param((k, p['file']), id=f'{k}-{p["file"]}') for k in ('made_up', 'committed')
    for p in report.PAGES if k == 'made_up' or (ROOT/'reports'/p['file']).exists()], indirect=True)

@each_page
@pytest.mark.parametrize('device', WIDTHS)
def test_fits_the_screen(browser, page, device):
    browser.open(page, *WIDTHS[device])
    width = WIDTHS[device][0]
    assert browser.eval('innerWidth') == width
    over = browser.eval('''[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
        && !e.closest('.table-box, pre, math, .skip')).slice(0, 3).map(e => e.outerHTML.slice(0, 200))''')
    assert browser.eval('document.documentElement.scrollWidth') <= width, over
    assert not over
    small = browser.eval('''[...document.querySelectorAll('main p, main li, main td, main figcaption')].filter(e =>
        e.offsetParent && parseFloat(getComputedStyle(e).fontSize) < 12).length''')
    assert small == 0, 'text smaller than 12 px'

@each_page
def test_loads_nothing_from_elsewhere(browser, page):
    browser.open(page, *WIDTHS['laptop'])
    sent = [e['params']['request']['url'] for e in browser.events if e.get('method') == 'Network.requestWillBeSent']
    assert [u for u in sent if not u.startswith(('data:', page.resolve().as_uri(), 'about:'))] == []
    said = [e['params'] for e in browser.events if e.get('method') in ('Log.entryAdded', 'Runtime.exceptionThrown')]
    assert said == [], 'the console is silent'
    assert browser.eval('document.scripts.length') == 0

@each_page
def test_figures_and_links(browser, page):
    browser.open(page, *WIDTHS['phone'])
    bad = browser.eval('''[...document.images].filter(i => !i.naturalWidth || !i.alt.trim()
        || i.naturalWidth != i.getAttribute('width')).map(i => i.alt)''')
    assert bad == []
    lost = browser.eval('''[...document.querySelectorAll('a[href^="#"]')]
        .filter(a => !document.getElementById(a.hash.slice(1))).map(a => a.hash)''')
    assert lost == []
    for href in browser.eval('''[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))'''):
        if not href.startswith(('#', 'http:', 'https:', 'mailto:')):
            assert (page.parent/urllib.parse.unquote(href.split('#')[0])).exists(), f'{page.name}: link to {href}'

CONTRAST = '''(() => {
  const rgb = s => (s.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const lum = c => { const [r, g, b] = c.slice(0, 3).map(v => v/255).map(
    v => v <= .03928 ? v/12.92 : ((v + .055)/1.055)**2.4);
    return .2126*r + .7152*g + .0722*b };
  const ground = e => { for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c
    } return [255, 255, 255] };
  const low = {};
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('img, math') || ![...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim())) continue;
    const [a, b] = [lum(rgb(getComputedStyle(e).color)), lum(ground(e))], r = (Math.max(a, b) + .05)/(Math.min(a, b) + .05);
    if (r < 4.5) low[`${e.tagName}.${e.className}`] = r.toFixed(2);
  }
  return low })()'''

@each_page
@pytest.mark.parametrize('dark', [False, True], ids=['light', 'dark'])
def test_contrast(browser, page, dark):
    browser.open(page, *WIDTHS['laptop'], dark=dark)
    assert browser.eval(CONTRAST) == {}, 'text and ground differ by less than 4.5 to 1'
