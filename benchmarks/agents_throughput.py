"""How fast the agent loop is: windows through the frequency rule, directly and behind the scripted server, eight in flight.

    python benchmarks/agents_throughput.py [--windows 500] [--out out] [--seconds 180]

Needs the stages up to `features` in the folder --out. Prints one line of JSON a run: wall and CPU seconds, and memory after each fifth. Fails where a run takes longer than
--seconds, or memory grows by more than a tenth after the first fifth."""
import argparse, json, sys, tempfile, time
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace as NS

sys.path.insert(0, str(Path(__file__).parent.parent/'tests'))
from clinical_rl import agents, core, features, local_agents, records, splits
from server_llm import Server
import pandas as pd


def rss(): # MB of this process now
    return int(next(l for l in open('/proc/self/status') if l.startswith('VmRSS')).split()[1])/1024


def world(out, n):
    "Windows of temporal, landscape (repeated where there are fewer than n), tools for each, and the rule."
    p = core.load_params(); r = records.Records.load(out/'records')
    block = features.load_block(out/'features', 'landscape', 'temporal', 'pair_(18|48)$')
    programs = pd.read_csv(out/'episodes/programs.csv')[['drug', 'drug_class']]
    gone = splits.excluded_ids(core.read_parquet(out/'splits/excluded.parquet'), 'landscape', 'temporal', 'train')
    w = block.windows; train = set(w.program[w.part == 'train']); test = w[w.part == 'test'].sample(frac=1, random_state=0)
    eps = pd.concat([test.assign(episode_id=test.episode_id + f'#{k}') for k in range(-(-n//len(test)))]).head(n)
    eps = eps.assign(scope='landscape', question=[agents.question(d, t, 'landscape') + f'\nWindow {e}' for e, d, t in zip(eps.episode_id, eps.program, eps.decision_date)])
    pasts = {t: features.open_past(r, t) for t in sorted(set(eps.decision_date))}
    counts = lru_cache(None)(lambda t, h, who: local_agents.field_counts(pasts[t], programs, train, gone, h, who))
    known = local_agents.fit_frequency(block, p.baselines.frequency.model_dump(), lambda t, d, h, who: counts(t, h, who)(d), p.features.line_regimen_kappa)
    limits = p.tools.limits.model_copy(update=dict(result_chars=60_000))
    return eps, agents.tool_maker(r, pasts, p.seed, limits=limits, search=p.tools.search), local_agents.Heuristic(known)


def brain(rule): # the rule as an answer of the scripted server
    def answer(body, server):
        reply = rule.chat(body['messages'])
        calls = [dict(id=c['id'], type='function', function=dict(name=c['name'], arguments=c['arguments'])) for c in reply.tool_calls]
        return dict(role='assistant', content=reply.text, tool_calls=calls)
    return answer


def measure(name, spec, eps, make, cfg, provider, seconds):
    "One run, with memory looked at as windows end."
    seen = []
    def watched(row): seen.append(rss()); return make(row)
    wall, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as d: _, runs = agents.run_agent(spec, eps, watched, cfg, provider=provider, transcripts=Path(d)/'t.jsonl')
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    fifths = [max(seen[:len(seen)*k//5]) for k in range(1, 6)]
    print(json.dumps(dict(run=name, windows=len(runs), submitted=int((runs.status == 'submitted').sum()), answers=int(runs.steps.sum()), in_flight=cfg.in_flight, wall_s=round(wall, 1),
                          cpu_s=round(cpu, 1), mb_after_each_fifth=[round(x) for x in fifths])))
    return wall <= seconds and fifths[-1] <= 1.1*fifths[0] and (runs.status == 'submitted').all()


if __name__ == '__main__':
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument('--windows', type=int, default=500); a.add_argument('--out', type=Path, default=core.root()/'out'); a.add_argument('--seconds', type=float, default=180)
    a = a.parse_args()
    core.set_threads(1)
    eps, make, rule = world(a.out, a.windows)
    for t, g in eps.groupby('decision_date'): make(next(g.itertuples())) # views are made once a date
    cfg = NS(in_flight=8, steps=60, tokens=10**9, usd=1, usd_total=10**6)
    spec = agents.AgentSpec('heuristic', **local_agents.HEURISTIC)
    ok = [measure('rule, direct', spec, eps, make, cfg, rule, a.seconds)]
    with Server(keep=False, rule=brain(rule)) as s, tempfile.TemporaryDirectory() as d:
        spec = agents.AgentSpec('server', 'rule', s.url)
        ok.append(measure('rule, behind the scripted server', spec, eps, make, cfg, agents.Provider(spec, agents.CallCache(d)), a.seconds))
    sys.exit(not all(ok))
