"""Leakage, censoring and holding out, end to end: too slow or too rough for the notebooks."""
import json
from types import SimpleNamespace as NS

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from clinical_rl import core, episodes, gate, rewards, splits
from clinical_rl.core import DataError, ParamError
from clinical_rl.records import KINDS, columns, example

HIDDEN = {k: [c.name for c in columns(k).itertuples() if c.why.startswith(('vintage', 'hidden'))] for k in (*KINDS, 'programs')}
WORD, NUMBER = 'XCANARYX', 987654321.0


# ---------------------------------------------------------------- records to test on

@pytest.fixture(scope='module')
def real(real_records): return real_records

@pytest.fixture(scope='module')
def params(): return core.load_params()

@pytest.fixture(scope='module')
def cut(real, params): return episodes.windows(real, params)

@pytest.fixture(scope='module')
def windows(cut): return pd.concat(cut[:2], ignore_index=True)

def small(n=40, seed=0, days=3650):
    "A few programs with random trials and rows of every kind, dates known."
    rng, ex = np.random.default_rng(seed), example()
    drugs = ['nivolumab', 'ipilimumab', 'dabrafenib']
    programs = pd.concat([ex.programs.assign(drug=d, synonyms=d[:3]) for d in drugs], ignore_index=True)
    def many(df, m, **cols):
        d = pd.concat([df]*m, ignore_index=True)
        day = pd.Timestamp('2010-01-01') + pd.to_timedelta(rng.integers(0, days, m), unit='D')
        lag = pd.to_timedelta(rng.integers(0, 800, m), unit='D')
        return d.assign(record_id=[f'{d.kind[0]}:{i}' for i in range(m)], event_date=day, public_date=day + lag, **cols)
    pick = lambda xs, m: [xs[i] for i in rng.integers(0, len(xs), m)]
    two = lambda m: ['|'.join(sorted(set(pick(drugs, 2)))) for _ in range(m)]
    own = two(n)
    reg = many(ex.registry, n, nct_id=[f'NCT{i:08d}' for i in range(n)], drugs=own, indications=pick(['NSCLC', 'MELANOMA|RCC', 'SCLC'], n),
               phase_code=pick(['1', '1/2', '2', '3'], n), line=pick(['first', 'later'], n), regimen=pick(['single', 'combination'], n),
               own=own, sponsor_known=True, usable=True)
    reg['public_date'] = reg.event_date + pd.Timedelta(days=30)
    return ex.replace(registry=reg, programs=programs, approvals=many(ex.approvals, n, drug=pick(drugs, n), indications=pick(['NSCLC', 'RCC'], n)),
                      filings=many(ex.filings, n), utilization=many(ex.utilization, n, drug=pick(drugs, n)), epidemiology=many(ex.epidemiology, n))

def public_at(records, t):
    "Only rows public at t; every vintage and hidden column replaced by something else; rows reversed."
    tables = {}
    for k, df in records.items():
        df = df[df.public_date <= t].iloc[::-1].reset_index(drop=True)
        for c in HIDDEN[k]:
            if c not in df: continue
            kind = df[c].dtype.kind
            df[c] = (~df[c] if c.startswith('later_') else pd.Series(pd.NaT if kind == 'M' else np.nan, df.index).astype(df[c].dtype))
        tables[k] = df
    programs = records.programs.assign(**{c: WORD for c in HIDDEN['programs']}, synonyms=WORD, sponsors=WORD)
    return records.replace(**tables, programs=programs)

def plant(records, t, drug):
    "Rows public the day after t in every table, with a word and a number that occur nowhere else, and in the vintage columns of all rows."
    tables = {}
    for k, df in records.items():
        cols = columns(k).set_index('name')
        row = df.iloc[[0]].copy()
        for c in row:
            if c in ('kind', 'date_basis'): continue
            if c in ('drug', 'drugs', 'own'): row[c] = drug
            elif c in ('event_date', 'public_date'): row[c] = t + pd.Timedelta(days=1)
            elif cols.type[c] == 'str' and c not in ('phase_code', 'indications', 'line', 'regimen', 'indication', 'country', 'measure', 'sex'): row[c] = WORD
            elif cols.type[c] == 'float': row[c] = NUMBER
        if k == 'epidemiology': row = row.assign(country='United States', region=np.nan, measure='incidence', sex='Both', indication='NSCLC', year=2100.)
        if k == 'filings': row['company'] = episodes.holder_at(drug, t)
        tables[k] = pd.concat([df, row.astype(df.dtypes.to_dict())], ignore_index=True)
    tables['registry'] = tables['registry'].assign(status=WORD, enrollment=NUMBER)
    tables['utilization'] = tables['utilization'].assign(brand=WORD)
    return records.replace(**tables, programs=records.programs.assign(parent=WORD, brand=WORD, sponsors=WORD, synonyms=WORD))

def state(records, t, drug, exclude=frozenset()): return next(iter(episodes.states_at(records, t, [drug], exclude)))[1]


# ---------------------------------------------------------------- leakage

def test_canaries_reach_no_state_of_the_real_tables(real, windows):
    for w in windows.sample(8, random_state=1).itertuples():
        planted = plant(real, w.decision_date, w.program)
        text = state(planted, w.decision_date, w.program).to_json()
        assert WORD not in text and str(int(NUMBER)) not in text, w.episode_id
        later = state(planted, w.decision_date + pd.Timedelta(days=2), w.program)
        for k in ('trials', 'approvals'): assert WORD in getattr(later, k).to_string(), k                # the test can fail
        for k in ('filings', 'utilization', 'epidemiology'): assert (getattr(later, k) == NUMBER).any(axis=None), k

def test_states_of_the_real_tables_ignore_what_comes_later(real, windows):
    some = windows[windows.scope == 'landscape'].sample(25, random_state=2)
    for t, w in some.groupby('decision_date'):
        drugs = sorted(set(w.program))
        full, cut = (dict(episodes.states_at(r, t, drugs)) for r in (real, public_at(real, t)))
        for d in drugs: assert full[d].to_json() == cut[d].to_json(), (d, t)

def test_no_brand_and_no_outcome_in_real_states(real, windows):
    brands = {b.lower() for b in real.programs.brand}
    some = windows[(windows.scope == 'landscape') & (windows.decision_date >= '2018')].sample(25, random_state=3)
    for e, s in episodes.states(real, some):
        text = s.to_json().lower()
        assert not [b for b in brands if b in text], e
        assert not any(w in text for w in ('completed', 'terminated', 'withdrawn', 'converted', 'parent')), e

@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10_000), day=st.integers(0, 5000), drug=st.sampled_from(['nivolumab', 'ipilimumab', 'dabrafenib']))
def test_states_of_random_tables_ignore_what_comes_later(seed, day, drug):
    t = pd.Timestamp('2009-06-01') + pd.Timedelta(days=day)
    r = small(seed=seed)
    text = state(r, t, drug).to_json()
    assert text == state(public_at(r, t), t, drug).to_json()
    assert text == state(plant(r, t, drug), t, drug).to_json()
    json.loads(text)

def test_a_row_is_seen_on_its_public_day_and_not_before():
    r = small()
    for k, df in r.items():
        for row in df.head(10).itertuples():
            for back, seen in ((1, False), (0, True)):
                ids = set(getattr(gate.as_of(r, row.public_date - pd.Timedelta(days=back)), k).record_id)
                assert (row.record_id in ids) is seen

def test_targets_lie_after_the_decision_and_outside_the_state(real, windows):
    date = real.registry.drop_duplicates('nct_id').set_index('nct_id').event_date
    for w in windows.itertuples(): assert all(w.decision_date < date[n] <= w.window_end for n in w.item_trials)
    some = windows[windows.scope == 'landscape'].sample(40, random_state=4)
    targets = some.set_index('episode_id').item_trials
    for e, s in episodes.states(real, some): assert not set(targets[e]) & set(s.trials.nct_id), e

def test_excluded_trials_leave_the_state(real, windows):
    w = windows[(windows.scope == 'landscape') & (windows.decision_date == '2020-02-01') & (windows.program == 'nivolumab')].iloc[0]
    before = state(real, w.decision_date, w.program)
    gone = frozenset(before.trials.nct_id[::2])
    after = state(real, w.decision_date, w.program, gone)
    assert after.trials.nct_id.tolist() == before.trials.nct_id[1::2].tolist()
    assert not [n for n in gone if n in after.to_json()]


# ---------------------------------------------------------------- windows

def test_counts_of_the_real_tables(cut, params):
    full, empty, chosen = cut
    n = full.groupby('scope').size()
    assert len(chosen) == params.data.max_programs and n['landscape'] >= 881 and n['sponsor'] >= 400
    assert set(full[full.scope == 'sponsor'].program) <= set(full[full.scope == 'landscape'].program)
    assert not full['empty'].any() and empty['empty'].all() and not set(full.episode_id) & set(empty.episode_id)
    assert pd.concat([full, empty]).episode_id.is_unique

def test_sponsor_portfolios_are_part_of_the_landscape(cut):
    full = cut[0].assign(key=lambda d: d.episode_id.str.split(':', n=1).str[1])
    land = full[full.scope == 'landscape'].set_index('key')
    for w in full[full.scope == 'sponsor'].itertuples(): assert set(w.item_trials) <= set(land.item_trials[w.key])

@settings(max_examples=30, deadline=None, derandomize=True)
@given(day=st.dates(pd.Timestamp('2000-01-02').date(), pd.Timestamp('2026-01-31').date()))
def test_every_day_is_in_one_window(day):
    cfg = NS(decision_months=[2, 8], window_months=6, last_decision='2025-08-01')
    starts = episodes.decision_dates('2000-01-01', cfg)
    inside = [(t < pd.Timestamp(day) <= episodes.window_end(t, cfg)) for t in starts]
    assert sum(inside) == 1 and inside.index(True) == episodes.window_of([pd.Timestamp(day)], starts)[0]

def test_empty_program_is_named(real, params):
    none = sorted(set(real.programs.drug) - set(episodes.trial_table(real.registry).query('usable').drug))
    assert none, 'every candidate has a trial: this test needs another'
    with pytest.raises(DataError, match=f'none for:.*{none[0]}') as e: episodes.windows(real, params, drugs=['nivolumab', none[0]])
    assert '\n' not in str(e.value) and 'data.max_programs' in str(e.value)

def test_too_few_programs(real, params):
    lost = real.replace(registry=real.registry[~real.registry.drugs.str.contains('nivolumab|bortezomib')])
    with pytest.raises(DataError, match='bortezomib.*nivolumab'): episodes.windows(lost, params.model_copy(update={'data': params.data.model_copy(update={'max_programs': 55})}))


# ---------------------------------------------------------------- rewards

def training_rewards(records, windows, made, params, split, scope='landscape', exclude=None):
    "What stage rewards writes for one scope and split: items, episodes."
    w = splits.apply(windows[~windows['empty']], *made, scope, split, 'train')
    gone = splits.excluded_ids(made[1], scope, split, 'train') if exclude is None else exclude
    return rewards.compute(w, records, params.rewards, rewards.as_of_dates(params)[split], fit=w.episode_id,
                           pan_tumour_above=params.episodes.pan_tumour_above, exclude=gone)

def same(a, b):
    for x, y in zip(a, b): pd.testing.assert_frame_equal(x, y)

@pytest.mark.parametrize('split', ['temporal', 'clean'])
def test_training_rewards_ignore_what_comes_after_the_cutoff(real, windows, made, params, split):
    day = rewards.as_of_dates(params)[split]
    assert day == pd.Timestamp(getattr(params.splits, split).train_before)
    a = training_rewards(real, windows, made, params, split)
    same(a, training_rewards(rewards.before(real, day), windows, made, params, split))
    assert a[0].reward.notna().sum() > 500

def test_held_out_outcomes_move_no_training_reward(real, windows, made, params):
    "Without what became of the held-out programs: their approvals, and the status of their trials."
    table, _ = made
    part = table[(table.split == 'drug') & (table.scope == 'landscape')].drop_duplicates('program').set_index('program').part
    held = set(part.index[part != 'train'])
    theirs = real.registry.drugs.str.split('|').map(lambda ds: bool(held & set(ds)))
    less = real.replace(approvals=real.approvals[~real.approvals.drug.isin(held)], registry=real.registry.assign(status=real.registry.status.mask(theirs)))
    a = training_rewards(real, windows, made, params, 'drug')
    same(a, training_rewards(less, windows, made, params, 'drug'))
    all_windows = windows[(windows.scope == 'landscape') & ~windows['empty']]                            # the test can fail
    x, y = (rewards.compute(all_windows, r, params.rewards, params.rewards.as_of)[1].set_index('episode_id').reward[a[1].episode_id] for r in (real, less))
    assert not np.allclose(x, y, equal_nan=True)

@pytest.mark.parametrize('split', list(splits.GROUP))
def test_trials_that_training_gave_up_move_no_training_reward(real, windows, made, params, split):
    gone = splits.excluded_ids(made[1], 'landscape', split, 'train')
    less = real.replace(registry=real.registry[~real.registry.nct_id.isin(gone)])
    a = training_rewards(real, windows, made, params, split)
    same(a, training_rewards(less, windows, made, params, split, exclude=frozenset()))
    assert not set(a[0].nct_id) & gone
    b = training_rewards(real, windows, made, params, split, exclude=frozenset())[0]                       # the test can fail
    assert (a[0].later_phase.fillna(-1) != b.later_phase.fillna(-1)).any()

def test_censoring_is_by_date_alone(real, cut, params):
    w = cut[0][cut[0].scope == 'landscape']
    t = w.set_index('episode_id').decision_date
    for day in sorted(set(rewards.as_of_dates(params).values())):
        items, eps = rewards.compute(w, real, params.rewards, day)
        for c in rewards.COMPONENTS:
            comp = getattr(params.rewards.components, c)
            last = min(day, pd.Timestamp(comp.coverage_end)) - pd.DateOffset(months=round(12*comp.horizon_years))
            want = items.episode_id.map(t) > last
            assert (items[f'{c}_censored'] == want).all() and items.loc[want, c].isna().all() and set(items[c].dropna()) <= {0., 1.}
        assert (items.reward.isna() == items[list(rewards.COMPONENTS)].isna().all(axis=1)).all()
        assert set(eps.episode_id) == set(w.episode_id) and eps.observed_share.between(0, 1).all()

def test_rewards_are_comparable_within_phase(real, cut, params):
    items, _ = rewards.compute(cut[0][cut[0].scope == 'landscape'], real, params.rewards, params.rewards.as_of)
    seen = items.dropna(subset='reward')
    pool = seen.phase.map(rewards.phase_pools(seen.phase.value_counts().to_dict(), params.rewards.min_phase_items))
    for _, g in seen.groupby(pool): assert abs(g.reward.mean()) < 1e-9 and abs(g.reward.std(ddof=0) - 1) < 1e-9
    assert pool.nunique() >= 4

def test_fit_rows_alone_give_the_scale(real, cut, params):
    "Held-out outcomes move no training reward when the scale is fitted on training episodes."
    w = cut[0][cut[0].scope == 'landscape']
    train = set(w.episode_id[w.program != 'nivolumab'])
    a, _ = rewards.compute(w, real, params.rewards, params.rewards.as_of, fit=train)
    b, _ = rewards.compute(w[w.program != 'nivolumab'], real, params.rewards, params.rewards.as_of)
    a = a[a.episode_id.isin(train)].reset_index(drop=True)
    pd.testing.assert_frame_equal(a, b)


# ---------------------------------------------------------------- splits

@pytest.fixture(scope='module')
def made(real, windows, params): return splits.make_splits(windows, real.programs, real.registry, params.splits, params.seed)

def test_no_registry_number_on_two_sides(made, windows, params):
    splits.check_splits(windows, *made)
    for scope in params.episodes.scopes:
        for split in params.splits.names:
            ids = {p: set().union(*map(set, splits.apply(windows, *made, scope, split, p).item_trials)) for p in splits.PARTS}
            assert not ids['train'] & ids['val'] and not ids['train'] & ids['test'] and not ids['val'] & ids['test']

def test_held_out_programs_leave_no_trial_in_training_states(real, made, windows, params):
    table, excluded = made
    held = set(table[(table.split == 'drug') & (table.part != 'train')].program)
    gone = splits.excluded_ids(excluded, 'landscape', 'drug', 'train')
    w = splits.apply(windows, table, excluded, 'landscape', 'drug', 'train').sample(15, random_state=5)
    drugs_of = real.registry.set_index('nct_id').drugs.str.split('|')
    for e, s in episodes.states(real, w, exclude=gone):
        assert not [n for n in s.trials.nct_id if held & set(drugs_of[n])], e

def test_planted_shared_trial_is_kept_by_the_more_held_out_part(real, made, windows, params):
    table, _ = made
    part = table[(table.split == 'drug') & (table.scope == 'landscape')].drop_duplicates('program').set_index('program').part
    one = {p: part.index[part == p][0] for p in splits.PARTS}
    row = real.registry.iloc[[0]].assign(nct_id='NCT99999999', record_id='planted', drugs='|'.join(one.values()))
    _, excluded = splits.make_splits(windows, real.programs, pd.concat([real.registry, row]), params.splits, params.seed)
    hit = excluded[(excluded.nct_id == 'NCT99999999') & (excluded.split == 'drug') & (excluded.scope == 'landscape')]
    assert sorted(hit.part) == ['train', 'val']

def test_dated_parts_do_not_overlap(made, windows, params):
    w = made[0].merge(windows[['episode_id', 'window_end']], on='episode_id')
    for split in splits.DATED:
        g = w[w.split == split].groupby('part')
        assert g.window_end.max()['train'] <= g.decision_date.min()['val'] and g.window_end.max()['val'] <= g.decision_date.min()['test']

@settings(max_examples=50, deadline=None, derandomize=True)
@given(names=st.sets(st.text(st.characters(codec='ascii', categories=['L']), min_size=1, max_size=8), min_size=6, max_size=40), seed=st.integers(0, 99))
def test_a_new_group_moves_few(names, seed):
    names = sorted(names)
    a, b = splits.draw_groups(names[1:], .2, .15, seed, 'drug'), splits.draw_groups(names, .2, .15, seed, 'drug')
    assert sum(a[n] != b[n] for n in names[1:]) <= 4

def test_faults_in_params(real, windows, params):
    bad = params.splits.model_copy(update={'drug_class': params.splits.drug_class.model_copy(update={'test': ['BTK inhibitr']})})
    with pytest.raises(ParamError, match="mean 'BTK inhibitor'"): splits.make_splits(windows, real.programs, real.registry, bad, 0)
    late = params.splits.model_copy(update={'names': ['clean'], 'clean': NS(train_before='2030-02-01', val_before='2030-08-01')})
    made = splits.make_splits(windows, real.programs, real.registry, late, 0)
    with pytest.raises(DataError, match="no episode in part 'val'"): splits.check_splits(windows, *made)
