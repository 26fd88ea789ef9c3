"""How the point-in-time store scales: adding a whole registry, adding what changed, and asking for one program on a day.

    python benchmarks/store_scale.py --sizes 60000 190000 570000 --out store_scale.json

A generated registry (seeded, invented words, a tenth of the trials name one or two of 140 programs, rows about as long as the
real ones) is added as one complete refresh, then 1 % of it with new titles as an incremental one, then the whole again,
unchanged but for that 1 %. `as_of` asks for a program of middling size on many dates: cold is the first question of a new
connection, warm are those that follow. Each size runs in a process of its own, so that the peak of memory is its own: `peak`
is the process, `base` the same process before the store did anything (the generator makes rows as they are asked for).
"""
import argparse, json, multiprocessing, resource, shutil, tempfile, time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from clinical_rl.sources.store import Store

PROGRAMS = [f'program{i}' for i in range(140)]
SYLLABLES = [('can', 'mor', 'tel', 'sur', 'vi'), ('ta', 'lo', 'pe', 'ri', 'mu')]
WORDS = np.array([f'{a}{b}{c}' for a in SYLLABLES[0] for b in SYLLABLES[1] for c in range(120)])

def batch(ids, seed, n, edited=False):
    "Rows of the trials `ids`, the same for the same seed however they are asked for."
    rng = np.random.default_rng([seed, int(ids[0])])
    words = lambda k: pa.array([' '.join(w) for w in WORDS[rng.integers(0, len(WORDS), (len(ids), k))]])
    first, second = (np.minimum(rng.exponential(25, len(ids)), 139).astype(int) for _ in range(2))
    two, named = rng.random(len(ids)) < .2, rng.random(len(ids)) < .1
    drugs = ['|'.join(sorted({PROGRAMS[a], PROGRAMS[b]} if t else {PROGRAMS[a]})) if y else None
             for a, b, t, y in zip(first, second, two, named)]
    day = pa.array((np.datetime64('2000-01-01') + (np.asarray(ids) * 9000 // n).astype('timedelta64[D]')).astype('datetime64[us]'))
    nct = [f'NCT{i:08d}' for i in ids]
    same = lambda v: pa.array([v] * len(ids))
    title = words(14)
    return pa.RecordBatch.from_pydict(dict(
        record_id=['reg:' + x for x in nct], kind=same('registry'), event_date=day, date_basis=same('first_posted'),
        source=same('generated'), drugs=drugs, nct_id=nct, phase=same('PHASE2'), conditions=words(8), interventions=words(10), lead_sponsor=words(3),
        title=pa.array([f'{x} edited' for x in title.to_pylist()]) if edited else title, start_date=day, completion_date=day,
        status=same('RECRUITING'), enrollment=pa.array(rng.integers(10, 900, len(ids)).astype(float)), has_results=same(False),
        vintage=pa.array(np.full(len(ids), np.datetime64('2026-01-15', 'us')))))

def registry(n, seed, edit=lambda block: False, only_edited=False, rows=200):
    "Batches of a registry of n trials; those of some blocks with new titles."
    for a in range(0, n, rows):
        e = edit(a // rows)
        if e or not only_edited: yield batch(range(a, min(a + rows, n)), seed, n, e)

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 # MiB

def timed(batches, add): # seconds of the store alone: the time that the generator took is taken off
    spent = [0.]
    def watched():
        it = iter(batches)
        while True:
            t = time.perf_counter()
            b = next(it, None)
            spent[0] += time.perf_counter() - t
            if b is None: return
            yield b
    t = time.perf_counter()
    counts = add(watched())
    return time.perf_counter() - t - spent[0], counts

def measure(args):
    n, seed, dates, threads, folder = args
    try: return _measure(n, seed, dates, threads, folder)
    finally: shutil.rmtree(folder, ignore_errors=True)

def _measure(n, seed, dates, threads, folder):
    list(registry(2000, seed))
    out, s = dict(trials=n, base_mib=peak()), Store(folder, threads)
    edit = lambda block: block % 100 == 7 # 1 % of the blocks
    out['full_s'], counts = timed(registry(n, seed), lambda b: s.add_stream('registry', '2026-01-15', b))
    assert counts['new'] == n, counts
    changed = list(registry(n, seed, edit, only_edited=True))
    out['one_percent_s'], counts = timed(changed, lambda b: s.add_stream('registry', '2026-01-22', b, complete=False))
    out['changed'] = counts['changed']
    out['full_again_s'], counts = timed(registry(n, seed, edit), lambda b: s.add_stream('registry', '2026-01-29', b))
    assert counts['changed'] == 0 and counts['same'] == n, counts
    out['store_mib'] = sum(p.stat().st_size for p in Path(folder).rglob('*.parquet')) / 2**20
    out['peak_mib'] = peak()
    s.close()
    days, cold, warm = pd.date_range('2012-01-01', '2026-02-01', periods=dates), [], []
    for day in days[:max(3, dates // 10)]: # the files are in the system's cache, DuckDB's own is empty
        s = Store(folder, threads)
        t = time.perf_counter(); s.as_of('registry', day, 'program20'); cold.append(time.perf_counter() - t)
        s.close()
    s = Store(folder, threads)
    s.as_of('registry', days[0], 'program20')
    for day in days:
        t = time.perf_counter(); df = s.as_of('registry', day, 'program20'); warm.append(time.perf_counter() - t)
    out |= dict(rows=len(df), **{f'{name}_{q}_ms': 1e3 * float(np.quantile(x, p)) for name, x in (('cold', cold), ('warm', warm))
                                for q, p in (('median', .5), ('p95', .95))})
    return out | dict(full_per_s=n / out['full_s'], one_percent_share=out['one_percent_s'] / out['full_s'])

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--sizes', type=int, nargs='+', default=[60_000, 190_000, 570_000], help='trials')
    p.add_argument('--dates', type=int, default=60, help='questions')
    p.add_argument('--threads', type=int, default=2, help='of DuckDB')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--folder', help='where the stores are made; default: a temporary folder')
    p.add_argument('--out', help='JSON file')
    a = p.parse_args()
    rows = []
    for n in a.sizes:
        with multiprocessing.get_context('spawn').Pool(1) as pool:
            rows.append(pool.map(measure, [(n, a.seed, a.dates, a.threads, tempfile.mkdtemp(dir=a.folder))])[0])
        print(pd.DataFrame(rows).T.to_string(float_format=lambda x: f'{x:,.3f}', header=False), flush=True)
        if a.out: Path(a.out).write_text(json.dumps(rows, indent=1) + '\n')

if __name__ == '__main__': main()
