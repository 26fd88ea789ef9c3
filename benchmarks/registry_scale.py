"""The whole registry on one machine: how fast are its pages parsed and stored, in how much memory, does cost grow linearly?

A registry of invented studies in the form of ClinicalTrials.gov's API v2, about 7 kB each, is written as a refresh leaves it:
pages of 1000, compressed, with their journal. Making it is not counted. Then, each in a process of its own:

- all pages are parsed by `registry_v2.stream` and added to a store, at a quarter, at half and at all of the studies;
- all are read once more the plain way, with `json` and pandas, to a Parquet file: the same rows;
- a second refresh brings one study in a hundred, changed, and is added to the store of all;
- the store is asked for the trials of one program as of a day.

    python benchmarks/registry_scale.py --studies 570000 --out out/registry_scale.json
"""
import argparse, json, os, random, re, resource, subprocess, sys, tempfile, threading, time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pandas as pd
import psutil

from clinical_rl.core import progress, root, write_json
from clinical_rl.records import load_programs
from clinical_rl.sources import registry_v2 as registry
from clinical_rl.sources.client import Pages
from clinical_rl.sources.pull import names_of
from clinical_rl.sources.store import Store

PAGE, FIRST, SECOND = 1000, '2025-01-01', '2025-02-01'

# ---- invented studies

def corpus(seed, size=20_000_000): # invented prose: long enough that hardly a passage is used twice
    rng = np.random.default_rng(seed)
    parts = np.array('ba ce di fo gu la me ni po ru sa te vi xo zu bran cel dor fen gil'.split())
    words = [''.join(w) for w in parts[rng.integers(0, len(parts), (6000, 3))]]
    text = ' '.join(np.array(words)[rng.zipf(1.3, size//7) % 6000])
    return text[:size]

class Invented:
    "Studies of invented text; study k is the same whenever it is made."
    SITES = [('Novaro', 'Lestia', 'Osterland', 47.25, 8.5), ('Port Quill', 'Marrow', 'United States', 40.1, -75.2),
             ('São Brás', None, 'Brasil', -8.1, -34.9), ('Linköping', None, 'Sverige', 58.4, 15.6)]
    STATUS = ['COMPLETED']*5 + ['RECRUITING']*3 + [
        'TERMINATED', 'WITHDRAWN', 'UNKNOWN', 'ACTIVE_NOT_RECRUITING', 'NOT_YET_RECRUITING']
    PHASES = [['PHASE1'], ['PHASE2'], ['PHASE2'], ['PHASE3'], ['PHASE1', 'PHASE2'], ['PHASE4'], ['NA'], ['NA'], ['NA']]

    def __init__(self, programs, seed=0):
        self.drugs, self.seed, self.text = list(programs.drug), seed, corpus(seed)

    def prose(self, rng, n):
        at = rng.randrange(len(self.text) - n)
        return self.text[at:at + n]

    def day(self, rng, since, until):
        y, m = divmod(rng.randrange(since*12, until*12), 12)
        return f'{y}-{m + 1:02d}' if rng.random() < .2 else f'{y}-{m + 1:02d}-{rng.randrange(1, 29):02d}'

    def study(self, k, version=0):
        rng = random.Random(f'{self.seed}-{k}')
        prose = lambda n: self.prose(rng, n)
        agents = [prose(12).strip() for _ in range(rng.randrange(1, 4))]
        if rng.random() < .02: agents.append(rng.choice(self.drugs))
        kind = 'INTERVENTIONAL' if rng.random() < .78 else 'OBSERVATIONAL'
        posted = f'{rng.randrange(2000, 2025)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}'
        outcome = lambda: dict(measure=prose(70), description=prose(160), timeFrame=f'{rng.randrange(1, 60)} months')
        status = dict(statusVerifiedDate='2024-06', overallStatus=rng.choice(self.STATUS),
            startDateStruct=dict(date=self.day(rng, 2000, 2026), type='ACTUAL'),
            primaryCompletionDateStruct=dict(date=self.day(rng, 2005, 2030), type='ESTIMATED'),
            completionDateStruct=dict(date=self.day(rng, 2005, 2031), type='ESTIMATED'), studyFirstSubmitDate=posted,
            studyFirstPostDateStruct=dict(date=posted, type='ACTUAL'), lastUpdateSubmitDate='2024-12-20',
            lastUpdatePostDateStruct=dict(date='2025-01-20' if version else '2024-12-20', type='ACTUAL'))
        design = dict(studyType=kind, enrollmentInfo=dict(count=rng.randrange(1, 900) + version, type='ESTIMATED'),
                      designInfo=dict(allocation='RANDOMIZED', interventionModel='PARALLEL', primaryPurpose='TREATMENT',
                                      maskingInfo=dict(masking='DOUBLE', whoMasked=['PARTICIPANT', 'INVESTIGATOR'])))
        if kind == 'INTERVENTIONAL': design['phases'] = rng.choice(self.PHASES)
        return dict(protocolSection=dict(
            identificationModule=dict(nctId=f'NCT{k:08d}', orgStudyIdInfo=dict(id=f'INV-{k}'), briefTitle=prose(80),
                                      organization=dict(fullName=prose(30), **{'class': 'OTHER'}), officialTitle=prose(140)),
            statusModule=status,
            sponsorCollaboratorsModule=dict(leadSponsor=dict(name=prose(28), **{'class': 'INDUSTRY'}),
                                            responsibleParty=dict(type='SPONSOR')),
            oversightModule=dict(oversightHasDmc=True, isFdaRegulatedDrug=False),
            descriptionModule=dict(briefSummary=prose(500), detailedDescription=prose(1300)),
            conditionsModule=dict(conditions=[prose(20) for _ in range(rng.randrange(1, 4))], keywords=[prose(15), prose(12)]),
            designModule=design,
            armsInterventionsModule=dict(
                armGroups=[dict(label=prose(25), type='EXPERIMENTAL', description=prose(120), interventionNames=[f'Drug: {a}'])
                           for a in agents],
                interventions=[dict(type='DRUG', name=a, description=prose(110), armGroupLabels=[prose(25)]) for a in agents]),
            outcomesModule=dict(primaryOutcomes=[outcome()], secondaryOutcomes=[outcome() for _ in range(rng.randrange(1, 6))]),
            eligibilityModule=dict(eligibilityCriteria=prose(1300), healthyVolunteers=False, sex='ALL', minimumAge='18 Years',
                                   stdAges=['ADULT', 'OLDER_ADULT']),
            contactsLocationsModule=dict(locations=[
                dict(facility=prose(24), city=c, country=land, geoPoint=dict(lat=lat, lon=lon)) | (dict(state=s) if s else {})
                for c, s, land, lat, lon in rng.choices(self.SITES, k=rng.randrange(1, 5))])),
            derivedSection=dict(miscInfoModule=dict(versionHolder='2024-12-31'),
                                conditionBrowseModule=dict(meshes=[dict(id='D000000', term=prose(15))])),
            hasResults=rng.random() < .12)

def write_refresh(folder, vintage, invented, ks, version=0, since=None):
    "Leave behind what a refresh that asked for everything would."
    pages, n = Pages(folder, vintage), len(ks)
    asked = registry.questions(None, SimpleNamespace(query='all', page_size=PAGE, since=since))['all']
    stamps, job = pages.job(registry.SOURCE, registry.VERSION), pages.job(registry.SOURCE, 'all')
    at, host = f'{vintage[:10]}T09:00:05', 'http://localhost/v2'
    stamps.add(msgspec.json.encode(dict(dataTimestamp=at)), f'{host}/version', {}, 0, timestamp=at)
    stamps.finish()
    size = 0
    for at in progress(range(0, n, PAGE), f'invent {vintage}', unit='page'):
        page = dict(studies=[invented.study(k, version) for k in ks[at:at + PAGE]])
        after = f't{at + PAGE}' if at + PAGE < n else None
        if after: page['nextPageToken'] = after
        body = msgspec.json.encode(page)
        size += len(body)
        params, k = asked | (dict(pageToken=f't{at}') if at else dict(countTotal='true')), len(page['studies'])
        job.add(body, f'{host}/studies', params, k, after, turn=1, new=k, total=None if at else n)
    job.finish(n)
    return size

def share_pages(folder, vintage, other, n): # a refresh of the first n studies, on the same pages
    a, b = Pages(folder, vintage), Pages(folder, other)
    for name in (registry.VERSION, 'all'):
        old, new = a.job(registry.SOURCE, name), b.job(registry.SOURCE, name)
        for l in old.lines[:-(-n//PAGE)]: new._append(l)
        new.finish(n)

# ---- what is measured, each in a process of its own

def ours(folder, vintage, store, workers):
    "Pages to store."
    q = []
    class Aside: # a quarantine that counts
        def add(self, *a): q.append(a)
    batches = registry.stream(Pages(folder, vintage), the_programs(), Aside(), workers=workers)
    counts = Store(store).add_stream('registry', vintage, batches, complete=vintage[:10] == FIRST)
    return counts | dict(quarantined=len(q))

def plain(folder, vintage, store, workers):
    "The same the plain way."
    programs, rows = the_programs(), []
    names = {n.lower(): p.drug for p in programs.itertuples() for n in names_of(p)}
    pattern = re.compile(r'\b(' + '|'.join(sorted(map(re.escape, names), key=len, reverse=True)) + r')\b', re.I)
    for _, body in Pages(folder, vintage).job(registry.SOURCE, 'all').bodies():
        for s in json.loads(body)['studies']:
            p = s['protocolSection']
            status, design, arms = p['statusModule'], p['designModule'], p['armsInterventionsModule']['interventions']
            date = lambda key: status.get(key, {}).get('date')
            rows.append(dict(
                nct_id=p['identificationModule']['nctId'], title=p['identificationModule']['briefTitle'],
                phase='|'.join(design.get('phases', [])) or None, conditions='|'.join(p['conditionsModule']['conditions']),
                interventions='|'.join(f"{i['type'].replace('_', ' ').title()}: {i['name']}" for i in arms),
                lead_sponsor=p['sponsorCollaboratorsModule']['leadSponsor']['name'], event_date=date('studyFirstPostDateStruct'),
                start_date=date('startDateStruct'), completion_date=date('completionDateStruct'), status=status['overallStatus'],
                enrollment=design.get('enrollmentInfo', {}).get('count'), has_results=s.get('hasResults')))
    df = pd.DataFrame(rows).drop_duplicates('nct_id', keep='last')
    for c in ('event_date', 'start_date', 'completion_date'): df[c] = pd.to_datetime(df[c], format='ISO8601')
    text = df.interventions + '|' + df.title
    df['drugs'] = ['|'.join(sorted({names[n.lower()] for n in pattern.findall(t)})) or None for t in text]
    df['enrollment'] = df.enrollment.where(df.enrollment.ne(99999999)).astype(float)
    df.to_parquet(Path(store).with_suffix('.parquet'))
    return dict(new=len(df))

def as_of(folder, vintage, store, workers):
    "One program as of a day; the median of 20 questions, the connection open."
    s, took = Store(store), []
    for i in range(21):
        start = time.perf_counter()
        n = len(s.as_of('registry', pd.Timestamp('2025-03-01') - pd.Timedelta(days=i), 'nivolumab'))
        took.append(time.perf_counter() - start)
    return dict(new=n, first_ms=1e3*took[0], median_ms=1e3*float(np.median(took[1:])))

def the_programs(): return load_programs(root()/'data'/'programs.csv')

def measure(what, *args):
    "Run one of the above in this process; print its figures as JSON."
    me, peak, over = psutil.Process(), [0], threading.Event()
    def watch(): # memory of this process and of those it started, shared pages counted once
        while not over.wait(.2):
            try: peak[0] = max(peak[0], sum(p.memory_full_info().pss for p in [me, *me.children(recursive=True)]))
            except psutil.Error: pass # one has just ended
    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    found = globals()[what](*args)
    took = time.perf_counter() - start
    over.set()
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(u.ru_utime + u.ru_stime for u in used)
    print(json.dumps(dict(what=what, seconds=took, cpu_seconds=cpu, peak_mb=peak[0]/2**20) | found))

def run(*args):
    done = subprocess.run([sys.executable, __file__, '--measure', *map(str, args)], capture_output=True, text=True)
    if done.returncode: raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument('--studies', type=int, default=570_000)
    ap.add_argument('--workers', type=int, default=2)
    ap.add_argument('--folder', help='for the pages, about 2.5 kB a study; default: a temporary one, removed at the end')
    ap.add_argument('--seed', type=int, default=0)
    ap.add_argument('--out', help='JSON file for the figures')
    ap.add_argument('--measure', nargs=5, help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.measure: return measure(a.measure[0], *a.measure[1:4], int(a.measure[4]))
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        folder, n = Path(folder), a.studies//4000*4000 or 4000
        invented = Invented(the_programs(), a.seed)
        size = write_refresh(folder, FIRST, invented, range(n))
        for part, k in (('quarter', n//4), ('half', n//2)): share_pages(folder, FIRST, f'{FIRST}.{part}', k)
        write_refresh(folder, SECOND, invented, range(0, n, 100), 1, FIRST)
        rows = []
        def note(studies, name, r): rows.append(dict(name=name, studies=studies) | r)
        note(n, 'plain json and pandas', run('plain', folder, FIRST, folder/'plain', 1))
        note(n, 'all, one process', run('ours', folder, FIRST, folder/'store1', 1))
        note(n//4, 'a quarter', run('ours', folder, f'{FIRST}.quarter', folder/'store4', a.workers))
        note(n//2, 'half', run('ours', folder, f'{FIRST}.half', folder/'store2', a.workers))
        note(n, 'all', run('ours', folder, FIRST, folder/'store', a.workers))
        note(n//100, 'one in a hundred changed', run('ours', folder, SECOND, folder/'store', a.workers))
        note(n, 'as of a day, one program', run('as_of', folder, FIRST, folder/'store', 1))
    t = pd.DataFrame(rows)
    t['per_second'] = (t.studies/t.seconds).where(t.what.ne('as_of'))
    s = t.set_index('name').seconds
    figures = dict(studies=n, bytes_a_study=size/n, workers=a.workers, cpus=os.cpu_count(), per_second=float(n/s['all']),
                   peak_mb=float(t.peak_mb[t.what.eq('ours')].max()),
                   times_plain=float(s['plain json and pandas']/s['all']),
                   times_plain_one_process=float(s['plain json and pandas']/s['all, one process']),
                   seconds_quarter_half_all=[float(s[x]) for x in ('a quarter', 'half', 'all')],
                   refresh_share=float(s['one in a hundred changed']/s['all']),
                   as_of_ms=float(t.median_ms.dropna().iloc[0]))
    print(t.drop(columns='what').round(1).to_string(index=False))
    print(json.dumps(figures, indent=1))
    if a.out: write_json(dict(figures=figures, rows=t.where(t.notna(), None).to_dict('records')), a.out)

if __name__ == '__main__': main()
