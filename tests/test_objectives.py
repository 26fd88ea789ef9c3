"What the objectives claim, on the simulator with few histories; and the errors that a run may meet on the way."
from dataclasses import replace
from functools import cache
from types import SimpleNamespace as NS

import numpy as np
import pandas as pd
import pytest

from clinical_rl import episodes, features, records as rec, rewards, simulator as sim, splits, value, weights
from clinical_rl.core import DataError, load_params
from clinical_rl.objectives import OBJECTIVES, describe

EARLY, LATE, MIXED = sim.World(), sim.World(pay=(0., 0., 3.)), (8, -2)
PLAIN = {o: (o, {}) for o in ('bc', 'rw_bc', 'lr_bc')}
STEEP = {'bc': ('bc', {}), 'sharp': ('rw_bc', dict(temperature=1/3, clip=(0, 100))), 'iql': ('iql', {})}
QUICK = dict(hidden=32, lr=1e-2, polyak=.05, steps=700)

def shares(world, skills, arms, seeds, **how):
    "Share of the best worth: a row a seed, a column an arm."
    return pd.DataFrame([t.set_index('arm').share_of_best
                         for t, _, _ in sim.repetitions(world, skills, arms, range(seeds), **how)])

@cache
def judged(): return sim.repetitions(LATE, MIXED, STEEP, [0], iql=QUICK)[0]

# --- claims ------------------------------------------------------------------------------------------------------------

def test_bc_recovers_the_behaviour_and_better_with_more_programs():
    truth = sim.behaviour(EARLY, MIXED)
    made = {n: [sim.history(EARLY, MIXED, n, s)[0] for s in range(5)] for n in (50, 200, 800, 3200)}
    far = [np.mean([sim.distance(sim.clone(w, OBJECTIVES['bc'](w)), *truth) for w in ws]) for ws in made.values()]
    assert all(a > 1.5*b for a, b in zip(far, far[1:])) and far[-1] < .03

def test_rw_bc_beats_bc_only_where_better_and_worse_were_tried_side_by_side():
    two = {o: PLAIN[o] for o in ('bc', 'rw_bc')}
    gain = {k: (s := shares(EARLY, k, two, 5)).rw_bc - s.bc for k in (MIXED, (20, 20), (0, 0))}
    assert (gain[MIXED] > .05).all()
    assert gain[20, 20].abs().max() < .01      # alike and near-perfect: nothing to gain
    assert (gain[0, 0] > .03).all()            # alike and erratic: still something to gain

@pytest.mark.parametrize('share', [(.5, .5), (.8, .2)])
def test_lr_bc_beats_rw_bc_where_late_outcomes_are_censored(share):
    s = shares(EARLY, MIXED, PLAIN, 3, horizon=12, share=share)
    assert (s.lr_bc - s.rw_bc > .02).all() and (s.rw_bc > s.bc).all()

def test_lr_bc_gains_nothing_where_all_is_known_or_where_the_past_misleads():
    s = shares(EARLY, MIXED, PLAIN, 3)
    assert (s.lr_bc - s.rw_bc).mean() < .01
    s = shares(EARLY, MIXED, PLAIN, 3, horizon=12, turn=13, target=replace(EARLY, promise=EARLY.promise[::-1]))
    assert (s.lr_bc - s.rw_bc).mean() < 0

def test_iql_beats_equally_steep_rw_bc_where_credit_is_late():
    t, windows, q = judged()
    v = t.set_index('arm').share_of_best
    assert v.iql > v.sharp + .2 and v.sharp < v.bc + .1

def test_q_agrees_with_dynamic_programming_where_the_data_cover():
    _, windows, q = judged()
    Q, aim = sim.learned_q(q), sim.expectile_q(*sim.exact_tables(LATE, MIXED), .99, .7)[0]
    counted = sim.expectile_q(*sim.counted_tables(windows), .99, .7)[0] # the same equations, solved on counts
    counted = sim.agreement(Q, counted, windows)
    assert counted['covered'] >= 40 and counted['correlation'] > .95 and counted['error'] < .4
    best, aim = sim.agreement(Q, sim.best_q(LATE), windows), sim.agreement(Q, aim, windows)
    assert best['correlation'] > .85 and aim['correlation'] > .85
    assert best['bias'] < aim['bias'] # an expectile of what sponsors do lies below the best

def test_censored_rewards_are_no_zeros_for_any_objective():
    "Hide the outcomes of the good half: whoever reads them as zeros would learn to avoid it."
    windows, items = (sim.observe(t, 0) for t in sim.history(EARLY, MIXED, 300, 0))
    hide = windows.outcome > windows.outcome.mean()
    windows['reward'] = windows.outcome.mask(hide & (windows.half_year > 12))
    w = OBJECTIVES['rw_bc'](windows)
    open_ = w[windows.reward.isna()]
    assert len(open_) > 100 and np.ptp(open_) < 1e-9 and open_[0] > w[windows.reward.to_numpy() < 0].max()
    windows, items = (sim.observe(t, 12) for t in sim.history(LATE, MIXED, 300, 0))
    full, zeros = (q for _, q in sim.judge([windows, windows.fillna({'reward': 0.})], [0, 0], .99, **QUICK))
    assert sim.learned_q(full).max() > sim.learned_q(zeros).max() + .5

# --- a run's errors ----------------------------------------------------------------------------------------------------

TABLE = pd.DataFrame(dict(episode_id=list('abcd'), program=list('aabb'),
                          decision_date=pd.to_datetime(['2010-02-01', '2010-08-01']*2), reward=[1., 0., np.nan, -1.],
                          predicted=[.5, .1, .3, -.5], advantage=[.2, -.1, 0., .1]))

@pytest.mark.parametrize('name', OBJECTIVES)
def test_weights_have_mean_one_are_finite_and_leave_the_table_alone(name):
    before = TABLE.copy()
    w = OBJECTIVES[name](TABLE)
    assert w.mean() == pytest.approx(1) and np.isfinite(w).all() and (w > 0).all()
    pd.testing.assert_frame_equal(TABLE, before)
    assert OBJECTIVES[name](TABLE[::-1])[::-1] == pytest.approx(w)
    assert describe(w)['effective_sample_size'] <= len(w) + 1e-9

@pytest.mark.parametrize('name, change, words', [
    *[(n, {}, 'no training window') for n in OBJECTIVES],
    *[(n, dict(reward=np.nan), 'all 4 training windows are censored') for n in ('rw_bc', 'lr_bc', 'iql')],
    ('rw_bc', dict(reward=1.), 'reward is 1 in all 4'), ('lr_bc', dict(predicted=0.), 'predicted is 0 in all 4'),
    ('iql', dict(advantage=.5), 'advantage is 0.5 in all 4'),
    ('rw_bc', dict(reward=[1, 0, -np.inf, 0]), 'reward of window c is -inf'),
    ('lr_bc', dict(predicted=[1, 2, 3, np.nan]), 'predicted of window d is nan'),
    ('iql', dict(advantage=[np.inf, 0, 0, 1]), 'advantage of window a is inf'),
    ('iql', dict(advantage=[-1e4, -2e4, -3e4, -4e4]), 'weights add up to 0')])
def test_meaningless_weights_are_an_error_of_one_line(name, change, words):
    t = TABLE.assign(**change) if change else TABLE[:0]
    with pytest.raises(DataError, match='^' + name) as e: OBJECTIVES[name](t)
    assert words in str(e.value) and '\n' not in str(e.value)

def test_missing_column_is_named():
    with pytest.raises(DataError, match="no column 'advantage'"): OBJECTIVES['iql'](TABLE.drop(columns='advantage'))

def test_exploding_q_learning_stops_with_its_step():
    windows, _ = (sim.observe(t, 0) for t in sim.history(LATE, MIXED, 60, 0))
    with pytest.raises(DataError, match=r'iql: loss \S+ at step \d+; lower lr'):
        sim.judge([windows], [0], .99, lr=1e6, steps=300, hidden=32)

def test_same_seed_same_numbers():
    windows, _ = (sim.observe(t, 6) for t in sim.history(LATE, MIXED, 60, 0))
    a, b, c = (sim.judge([windows], [s], .99, steps=30, hidden=16)[0][0].advantage for s in (1, 1, 2))
    assert (a == b).all() and (a != c).any()

def test_transitions_keep_empty_windows_and_tell_an_end_from_a_cut():
    t = pd.DataFrame(dict(episode_id=['a0', 'a1', 'a2', 'b0', 'b1'], program=list('aaabb'), reward=[1, np.nan, 0, 1, 1],
                          decision_date=pd.to_datetime(['2010-02-01', '2010-08-01', '2011-02-01', '2010-02-01', '2010-08-01'])))
    m = value.transitions(t)
    assert m['next'].tolist() == [1, 2, -1, 4, -1] and m.done.tolist() == [False]*4 + [True]
    assert m.truncated.tolist() == [False, False, True, False, False]

def test_every_program_censored_but_one_is_an_error():
    windows, items = (sim.observe(t, 12) for t in sim.history(EARLY, MIXED, 60, 0))
    one = items[items.reward.notna()].groupby('program').reward.nunique().idxmax()
    alone = items.assign(reward=items.reward.where(items.program == one))
    with pytest.raises(DataError, match=f'only program {one}'): sim.predict(windows, alone)

def test_the_simulator_has_ten_seeds_or_more(): assert load_params().simulator.seeds >= 10

# --- what is held out or comes later reaches no weight -----------------------------------------------------------------

DRUGS = ['abemaciclib', 'apalutamide', 'dabrafenib', 'ibrutinib', 'ipilimumab', 'lenalidomide', 'nivolumab',
         'olaparib', 'osimertinib', 'palbociclib',
         'pembrolizumab', 'venetoclax']
CUT = pd.Timestamp(load_params().splits.temporal.train_before)

def small(seed=0, n=400):
    "A dozen programs, one class, with random trials and rows of every kind; a tenth of the trials belong to two programs."
    rng, ex = np.random.default_rng(seed), rec.example()
    pick = lambda xs, m: [xs[i] for i in rng.integers(0, len(xs), m)]
    def many(df, m, **cols):
        day = pd.Timestamp('2014-01-01') + pd.to_timedelta(rng.integers(0, 11*365, m), unit='D')
        public = day + pd.to_timedelta(rng.integers(1, 200, m), unit='D')
        return pd.concat([df]*m, ignore_index=True).assign(record_id=[f'{df.kind[0]}:{i}' for i in range(m)], event_date=day,
                                                           public_date=public, **cols)
    drugs = ['|'.join(sorted({a, b if x < .1 else a})) for a, b, x in zip(pick(DRUGS, n), pick(DRUGS, n), rng.random(n))]
    reg = many(ex.registry, n, nct_id=[f'NCT{i:08d}' for i in range(n)], drugs=drugs, own=drugs,
               sponsor_known=True, usable=True, regimen='single',
               lead_sponsor=[d.split('|')[0].upper() for d in drugs],
               indications=pick(['NSCLC', 'MELANOMA|RCC', 'SCLC', 'BREAST'], n),
               phase_code=pick(['1', '2', '3'], n), line=pick(['first', 'later'], n), status=pick(['TERMINATED', 'COMPLETED'], n))
    reg['completion_date'], reg['vintage'] = (reg.event_date + pd.Timedelta(days=d) for d in (600, 1500))
    named = lambda df, m, **cols: many(df, m, drug=pick(DRUGS, m), **cols)
    return ex.replace(registry=reg, approvals=named(ex.approvals, 60, indications=pick(['NSCLC', 'RCC', 'BREAST'], 60)),
                      filings=many(ex.filings, 60, company=pick([d.upper() for d in DRUGS], 60)),
                      utilization=named(ex.utilization, 60), epidemiology=many(ex.epidemiology, 20),
                      programs=pd.concat([ex.programs.assign(drug=d, synonyms=d[:4]) for d in DRUGS], ignore_index=True))

def weighed(records, split):
    "What the weights of a split are made of, from the records on."
    p = load_params()
    w = pd.concat(episodes.windows(records, p, DRUGS)[:2], ignore_index=True)
    only = p.splits.model_copy(update=dict(names=[split]))
    table, gone = splits.make_splits(w, records.programs, records.registry, only, p.seed)
    train = splits.apply(w, table, gone, 'landscape', split, 'train')
    train = train[~train['empty']]
    items, reward = rewards.compute(train, records, p.rewards, rewards.as_of_dates(p)[split],
                                    fit=train.episode_id, exclude=splits.excluded_ids(gone, 'landscape', split, 'train'))
    pasts = {t: features.open_past(records, t) for t in sorted(w.decision_date[w.scope == 'landscape'].unique())}
    block = features.as_block(*features.build(pasts, w, table, gone, records.programs[['drug', 'drug_class']],
                                               'landscape', split, p.features.half_lives_months))
    cfg = p.weights.model_copy(update=dict(iql=p.weights.iql.model_copy(update=dict(hidden=16, steps=60))))
    judged, scored, curve = weights.assess(block, items, reward, cfg, 18, p.seed)
    return NS(windows=weights.weigh(judged, cfg), items=scored, reward=reward, curve=curve,
              held=set(table.program[table.part != 'train']))

def differ(a, b):
    "Names of the tables that are not the same in both, to the last bit."
    return [k for k in ('windows', 'items', 'reward', 'curve') if not getattr(a, k).equals(getattr(b, k))]

@cache
def whole(split): return weighed(small(), split)

def plant(records, programs):
    "Replace all about some programs: outcomes, approvals early and everywhere, a thousand trials more of one kind, figures."
    rng, only = np.random.default_rng(1), lambda d: set(d.split('|')) <= programs
    reg, a, f, u = (getattr(records, k).copy() for k in ('registry', 'approvals', 'filings', 'utilization'))
    of = reg.drugs.map(only)
    any_of = reg.drugs.map(lambda d: bool(set(d.split('|')) & programs))        # shared trials, too: training gave them up
    reg.loc[any_of, ['indications', 'phase_code', 'line', 'status']] = ['HCC', '4', 'maintenance', 'WITHDRAWN']
    reg.loc[of, 'lead_sponsor'] = 'CANARY'
    more = reg[of].sample(1000, replace=True, random_state=1)
    day = pd.Timestamp('2014-01-01') + pd.to_timedelta(rng.integers(0, 11*365, 1000), unit='D')
    more = more.assign(nct_id=[f'NCT9{i:07d}' for i in range(1000)], record_id=[f'c:{i}' for i in range(1000)],
                       event_date=day, public_date=day)
    a.loc[a.drug.isin(programs), ['indications', 'designations']] = ['HCC|NSCLC|RCC', 'priority']
    a.loc[a.drug.isin(programs), ['event_date', 'public_date']] = pd.Timestamp('2014-02-02')
    f.loc[f.company.str.lower().isin(programs), 'rd_expense_usd'] = 1e15
    u.loc[u.drug.isin(programs), 'total_spending_usd'] = 1e15
    return records.replace(registry=pd.concat([reg, more], ignore_index=True), approvals=a, filings=f, utilization=u)

def test_records_and_outcomes_of_held_out_programs_reach_no_weight():
    base = whole('drug')
    assert len(base.windows) > 100 and 2 <= len(base.held) <= 6 and base.windows.reward.notna().any()
    assert differ(base, weighed(plant(small(), base.held), 'drug')) == []
    trained = next(d for d in DRUGS if d not in base.held)
    assert 'windows' in differ(base, weighed(plant(small(), {trained}), 'drug')) # the test can fail

def test_what_comes_after_as_of_reaches_no_weight_of_a_split_by_date():
    base, records = whole('temporal'), small()
    assert len(base.windows) > 100 and base.windows.reward.isna().any() and base.windows.reward.notna().any()
    cut = lambda day: rewards.before(records.replace(**{k: df[df.public_date <= day] for k, df in records.items()}), day)
    assert differ(base, weighed(cut(CUT), 'temporal')) == []
    assert 'windows' in differ(base, weighed(cut(CUT - pd.DateOffset(months=30)), 'temporal')) # the test can fail
