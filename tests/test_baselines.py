"What is too slow or too rough for the notebooks: leakage of features and baselines on the real tables, broken prediction files."
import dataclasses

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clinical_rl import baselines, core, decoding, episodes, features, metrics, splits as sp

H = [6, 18, 48]


@pytest.fixture(scope='module')
def world(real_records):
    "Real records and windows of eight programs."
    p, r = core.load_params(), real_records
    trials = episodes.trial_table(r.registry, p.episodes.pan_tumour_above)
    drugs = list(episodes.choose_programs(trials, r.programs.drug, 8, p.episodes).drug)
    full, empty, _ = episodes.windows(r, p, drugs)
    wins = pd.concat([full, empty], ignore_index=True)
    programs = r.programs[r.programs.drug.isin(drugs)][['drug', 'drug_class']].reset_index(drop=True)
    return p, r, wins, programs


def plant(r, **change):
    "The registry with a trial added: a copy of its first usable row."
    row = r.registry[r.registry.usable.astype(bool)].iloc[[0]].assign(record_id='planted', nct_id='NCT99999999', **change)
    return r.replace(registry=pd.concat([r.registry, row], ignore_index=True).astype(r.registry.dtypes.to_dict()))


def test_future_changes_no_feature(world):
    "Rows that become public after t, in every table, change no feature at t."
    p, r, wins, programs = world
    t = pd.Timestamp('2016-08-01'); drugs = list(programs.drug); late = t + pd.Timedelta(days=1)
    figures = ['rd_expense_usd', 'revenue_usd', 'cash_usd', 'total_spending_usd', 'count']  # three times what they were
    later = {k: pd.concat([df, df[df.public_date <= t].assign(record_id=lambda d: 'late:' + d.record_id, public_date=late, **{c: df[c]*3 for c in figures if c in df})],
                          ignore_index=True) for k, df in r.items() if k != 'registry'}
    planted = plant(r.replace(**later), event_date=t - pd.Timedelta(days=3), public_date=late, drugs='|'.join(drugs), own='|'.join(drugs), indications='MESO', phase_code='3')
    made = [features.date_features(features.open_past(x, t), drugs, programs, set(drugs), set(), set(), 'landscape', H) for x in (r, planted)]
    for name in made[0][0]: assert np.array_equal(made[0][0][name], made[1][0][name]), name
    assert np.array_equal(made[0][1], made[1][1]) and made[0][2:] == made[1][2:]
    seen = features.date_features(features.open_past(planted, late), drugs, programs, set(drugs), set(), set(), 'landscape', H)
    for kind, names in features.catalogue(H).items():  # the test can fail: each kind of record comes through a day later
        if kind != 'candidate': assert any(not np.array_equal(made[0][0][c], seen[0][c]) for c in names), kind


def held_out(wins, part):
    "A split that holds out the first programs for test and validation."
    s = wins[['scope', 'episode_id', 'program', 'decision_date']].assign(split='drug')
    return s.assign(part=s.program.map(part))


@pytest.mark.parametrize('scope', ['landscape', 'sponsor'])
def test_held_out_program_leaves_no_trace(world, scope):
    "Unheard-of trials of a held-out program, some shared with training programs, change no training number and no prior."
    p, r, wins, programs = world
    drugs = list(programs.drug); part = dict(zip(drugs, ['test', 'val'] + ['train']*6))
    twin = programs.assign(drug_class='one class')  # all are peers, the worst case
    dates = [pd.Timestamp(d) for d in ('2012-02-01', '2014-02-01', '2015-08-01', '2017-02-01')]
    wins = wins[wins.decision_date.isin(dates)].reset_index(drop=True)
    changed = r
    for k, other in enumerate(['', *drugs[2:5]]):
        names = '|'.join(sorted({drugs[0], other} - {''}))
        changed = plant(changed, drugs=names, own=names, indications='MESO|THYMIC', phase_code='2/3', event_date=pd.Timestamp('2011-03-01'), public_date=pd.Timestamp('2011-03-01'))
        changed.registry.loc[changed.registry.nct_id == 'NCT99999999', 'nct_id'] = f'NCT9999999{k}'
    day = dict(event_date=pd.Timestamp('2010-12-31'), public_date=pd.Timestamp('2011-03-01'), drug=drugs[0])  # nor do its approvals and its sales
    more = dict(approvals=dict(record_id='planted', agency='FDA', designations='accelerated_approval', indications='MESO', reference_product=True),
                utilization=dict(record_id='planted', year=2010, total_spending_usd=1e9, biosimilar=False))
    changed = changed.replace(**{k: pd.concat([df := getattr(changed, k), df.iloc[[0]].assign(**day, **row)], ignore_index=True).astype(df.dtypes.to_dict())
                                 for k, row in more.items()})
    splits, blocks = held_out(wins, part), []
    for x in (r, changed):
        gone = sp.shared_trials(x.registry, part).assign(scope=scope, split='drug')
        pasts = {t: features.open_past(x, t) for t in dates}
        blocks.append(features.as_block(*features.build(pasts, wins, splits, gone, twin, scope, 'drug', H)))
    a, b = blocks
    train = a.rows('train')
    assert a.pairs == b.pairs and a.columns == b.columns
    assert np.array_equal(a.X[train], b.X[train]) and np.array_equal(a.lr[train], b.lr[train]) and np.array_equal(a.y[train], b.y[train])
    other = [j for j, c in enumerate(a.columns) if c.startswith(('peer_', 'all_'))]
    assert np.array_equal(a.X[:, :, other], b.X[:, :, other])  # nor the priors of held-out windows
    mine = np.flatnonzero(a.windows.program == drugs[0])
    for c in ('any_rate', 'approved_n', 'spend_log'): assert not np.array_equal(a[c][mine], b[c][mine]), c  # its own past does change
    held = b.windows.program == drugs[0]  # and canaries in all that is known of its windows
    b = dataclasses.replace(b, windows=b.windows.assign(back=b.windows.back.mask(held, 0)), X=b.X.copy(), y=b.y.copy())
    b.X[mine], b.y[mine] = 1e6, 9
    trees = dict(learning_rate=0.1, max_iter=5, max_leaf_nodes=4, min_samples_leaf=5, negatives=0.5)
    settings = dict(empty={}, last_window=dict(max_back=4), frequency=dict(half_life_months=18, prior=0.1), class_prior=dict(half_life_months=18, kappa=1),
                    nearest=dict(k=5, half_life_months=18, shrink=1), logistic=dict(C=0.01, negatives=0.5), boosting=trees, average=dict(C=0.01, **trees))
    for m in baselines.METHODS if scope == 'landscape' else ():  # of so few dates no validation episode is left in scope sponsor
        section = {k: [v] for k, v in settings[m].items()}
        P, Q = (baselines.run(m, x, scope, 'drug', section)[0].set_index('episode_id') for x in (a, b))
        other = [e for e in P.index if e not in set(a.windows.episode_id[mine])]
        assert len(other) and P.loc[other].to_dict() == Q.loc[other].to_dict(), m
        assert m == 'empty' or P.to_dict() != Q.to_dict(), m  # the test can fail
    for fit, rows in [*baselines.out_of_fold(a.windows, 3), (train, np.flatnonzero(a.windows.program != drugs[0]))]:
        P, Q = (baselines.average(x, fit, settings['average'])(rows) for x in (a, b))
        assert np.array_equal(P, Q)


def test_anchor_knows_nothing_of_its_program(world):
    "Out of fold, and after an origin, labels of the own program and of later windows change no probability."
    p, r, wins, programs = world
    wins = wins[(wins.scope == 'landscape') & (wins.decision_date >= '2014-02-01') & (wins.decision_date <= '2018-02-01')].reset_index(drop=True)
    none = pd.DataFrame(columns=['scope', 'split', 'part', 'nct_id'])
    splits = wins[['scope', 'episode_id', 'program', 'decision_date']].assign(split='temporal', part=np.where(wins.decision_date < '2017-02-01', 'train', 'val'))
    pasts = {t: features.open_past(r, t) for t in wins.decision_date.unique()}
    block = features.as_block(*features.build(pasts, wins, splits, none, programs, 'landscape', 'temporal', H))
    setting = dict(C=0.01, learning_rate=0.1, max_iter=5, max_leaf_nodes=4, min_samples_leaf=5, negatives=0.5)
    w, origin = block.windows, pd.Timestamp('2016-02-01')
    folds = [(fit, rows, w.program.isin(w.program[rows])) for fit, rows in baselines.out_of_fold(w, 4)]
    assert sorted(np.concatenate([rows for _, rows, _ in folds])) == block.rows('train').tolist()
    for fit, rows, secret in folds + [(*baselines.forward(w, [origin], 12)[0], w.window_end > origin)]:
        told = {}
        for name, change in dict(no=[], secret=np.flatnonzero(secret), known=fit).items():
            y = block.y.copy(); y[change] = 1 - (y[change] > 0)
            told[name] = baselines.average(dataclasses.replace(block, y=y), fit, setting)(rows)
        assert len(rows) and np.array_equal(told['no'], told['secret']) and not np.array_equal(told['no'], told['known'])


def test_neighbours_are_public(world):
    "Rows public after t, deleted from the states and from the labels of every window, change no neighbour at t and nothing that is read off one."
    p, r, wins, programs = world
    drugs = list(programs.drug); part = dict(zip(drugs, ['test', 'val'] + ['train']*6)); t = pd.Timestamp('2016-08-01')
    wins = wins[(wins.scope == 'landscape') & (wins.decision_date >= '2013-02-01') & (wins.decision_date <= '2017-02-01')].reset_index(drop=True)
    public = set(r.registry.nct_id[r.registry.public_date <= t]); cut = r.replace(**{k: df[df.public_date <= t] for k, df in r.items()})
    none = pd.DataFrame(columns=['scope', 'split', 'part', 'nct_id']); pasts = {d: features.open_past(r, d) for d in wins.decision_date.unique()}
    old = {d: features.open_past(cut, d) for d in pasts}
    full = features.as_block(*features.build(pasts, wins, held_out(wins, part), none, programs, 'landscape', 'drug', H))
    less = features.as_block(*features.build(old, wins, held_out(wins, part), none, programs, 'landscape', 'drug', H))
    setting, place, shown = dict(k=25, half_life_months=18), {k: i for i, k in enumerate(full.pairs)}, np.zeros_like(full.y)
    held = wins.set_index('episode_id')
    for i, e in enumerate(full.windows.episode_id):  # the labels that are public on t
        for item, nct in zip(held['items'][e], held.item_trials[e]):
            if nct in public and (k := place.get((item['indication'], item['phase']))) is not None: shown[i, k] += 1
    fit, rows = full.rows('train'), np.flatnonzero((full.windows.decision_date == t) & (full.windows.part != 'train'))
    assert full.pairs == less.pairs and list(full.windows.episode_id) == list(less.windows.episode_id) and len(rows)
    W, V = (baselines.neighbours(b, fit, rows, setting) for b in (full, less))
    assert np.array_equal(W, V) and W.any()
    Y, Z = full.y[fit] > 0, shown[fit] > 0
    assert np.array_equal(W @ Y, V @ Z)
    ends = (full.windows.window_end == t).to_numpy()[fit]
    assert (Y[ends] != Z[ends]).any()  # the test can fail: windows that end on t hold labels that are public only later


def test_known_needs_no_phase(world):
    "A public trial without a phase makes its indication known; one that is public later does not."
    p, r, wins, programs = world
    t = pd.Timestamp('2012-02-01'); drug = programs.drug.iloc[0]; w = wins[(wins.program == drug)].iloc[[0]].assign(decision_date=t)
    known = lambda x: set(features.known_indications({t: features.open_past(x, t)}, w).known.iloc[0].split('|'))
    new = dict(drugs=drug, own=None, indications='DESMOID', phase_code=None, usable=False, event_date=t)
    assert 'DESMOID' not in known(r)
    assert known(plant(r, **new, public_date=t)) == (known(r) | {'DESMOID'}) - ({''} if known(r) == {''} else set())
    assert known(plant(r, **new, public_date=t + pd.Timedelta(days=1))) == known(r)


def test_deterministic(world):
    "The same inputs give the same predictions."
    p, r, wins, programs = world
    dates = [pd.Timestamp(d) for d in ('2016-02-01', '2017-02-01', '2018-02-01', '2019-02-01', '2022-02-01')]
    wins = wins[wins.decision_date.isin(dates)].reset_index(drop=True)
    part = dict(zip(dates, ['train']*3 + ['val', 'test']))
    splits = wins[['scope', 'episode_id', 'program', 'decision_date']].assign(split='temporal', part=wins.decision_date.map(part))
    none = pd.DataFrame(columns=['scope', 'split', 'part', 'nct_id'])
    pasts = {t: features.open_past(r, t) for t in dates}
    block = features.as_block(*features.build(pasts, wins, splits, none, programs, 'landscape', 'temporal', H))
    for m in baselines.METHODS:
        section = {k: v[:1] for k, v in getattr(p.baselines, m).model_dump().items()}
        one, two = (baselines.run(m, block, 'landscape', 'temporal', section, seed=7)[0] for _ in range(2))
        assert one.to_dict() == two.to_dict(), m
        assert decoding.validate_predictions(one).num_rows == len(block.rows('val')) + len(block.rows('test'))
        if m != 'empty': assert one['items'].map(len).sum() > 0


ITEM = ('NSCLC', '3', 'first', 'combination')
GOOD = decoding.prediction_frame(['landscape:x:2022-02-01'], [[ITEM]], [[(*ITEM, 0.7)]], scope='landscape', split='temporal', method='logistic')
BROKEN = {
    'no column': (lambda t: t.drop_columns(['items']), "no column 'items'"),
    'wrong type': (lambda t: t.set_column(t.column_names.index('seed'), 'seed', pa.array(['seven'])), 'seven'),
    'empty cell': (lambda t: t.set_column(0, 'scope', pa.array([None], pa.string())), "column 'scope' has an empty cell"),
    'twice': (lambda t: pa.concat_tables([t, t]), "window 'landscape:x:2022-02-01' is predicted twice"),
}


@pytest.mark.parametrize('name', BROKEN)
def test_malformed_predictions(tmp_path, name):
    "One line that names the file, the fault and the remedy."
    change, words = BROKEN[name]
    path = tmp_path/'logistic.parquet'
    pq.write_table(change(decoding.validate_predictions(GOOD)), path)
    with pytest.raises(core.DataError) as e: decoding.read_predictions(path)
    assert words in str(e.value) and 'logistic.parquet' in str(e.value) and '\n' not in str(e.value)


@pytest.mark.parametrize('content', [b'', b'PAR1', b'not a table'])
def test_damaged_predictions(tmp_path, content):
    path = tmp_path/'logistic.parquet'; path.write_bytes(content)
    with pytest.raises(core.DataError, match='logistic.parquet'): decoding.read_predictions(path)


def test_missing_predictions(tmp_path):
    with pytest.raises(core.DataError, match='cannot be read'): decoding.read_predictions(tmp_path/'none.parquet')


@pytest.mark.parametrize('change, words', [
    (lambda i: i | dict(indication='LUNG'), "indication 'LUNG'"), (lambda i: i | dict(phase='3b'), "phase '3b'"), (lambda i: i | dict(regimen=None), "regimen 'None'")])
def test_unknown_codes(change, words):
    bad = GOOD.assign(items=[[change(GOOD['items'][0][0])]])
    with pytest.raises(core.DataError, match=words): decoding.validate_predictions(bad, 'x.parquet')


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path/'m.parquet'
    decoding.write_predictions(GOOD, path); before = path.read_bytes()
    with pytest.raises(core.DataError): decoding.write_predictions(GOOD.drop(columns='seed'), path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ['m.parquet']


def test_window_of_another_split():
    wins = pd.DataFrame(dict(episode_id=['a'], program=['x'], decision_date=[pd.Timestamp('2022-02-01')], empty=[False], items=[[]]))
    with pytest.raises(core.DataError, match='not among the windows'): metrics.score_episodes(GOOD, wins, dict(indication=1, phase=1, line=1, regimen=1))


def test_expected_f1_is_best_by_simulation():
    "On 300 candidates no other size, and no swap at the border, does better in 20,000 simulated truths."
    rng = np.random.default_rng(0); p = np.sort(rng.beta(0.1, 3, 300))[::-1]
    y = rng.random((20000, 300)) < p; n = y.sum(1); hits = np.cumsum(y, 1)
    f1 = (2*hits/(np.arange(1, 301) + n[:, None])).mean(0)
    k = len(decoding.expected_f1_set(p))
    np.testing.assert_allclose(decoding.expected_f1_curve(p)[k-1], f1[k-1], atol=0.005)
    assert f1[k-1] >= f1.max() - 0.003
