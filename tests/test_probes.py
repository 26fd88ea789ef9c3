"Probes find what was planted, in chat models and in a language model, and rarely find what is not there."
import numpy as np, pandas as pd, pytest

from clinical_rl import core, probes
from clinical_rl.probes import ToyProvider, chat_scores, cutoff_gap, local_scores, make_cases, masked_names, recall, recall_answers, \
    recall_likelihood, recall_questions, recall_scores, swapped_names, toy_reader, toy_scores, toy_world, true_or_false

N = 500 # resamples

@pytest.fixture(scope='module')
def world(): return toy_world(7)

def cases_of(world, **kw): return make_cases(world.prompts, world.windows, world.programs, world.forecasts, n=40, **kw)

def chat_probes(world, provider, questions):
    scores = chat_scores(provider, cases_of(world))
    return dict(recall=recall(recall_answers(provider, questions), N), masked=masked_names(scores, N), swapped=swapped_names(scores, N))

def test_every_probe_finds_a_chat_model_that_knows(world):
    got = chat_probes(world, ToyProvider(world, knows=True), recall_questions(world.trials, per=4))
    got['cutoff'] = cutoff_gap(*toy_scores(world, 0.7), '2021-02-01', n=N)
    for name, f in got.items(): assert f.found[f.test].all(), (name, f.verdict.tolist())

def test_a_clean_chat_model_is_rarely_accused():
    "Fourteen worlds, each with another model: a probe that tests at 5 % may accuse one or two, not three."
    accused = dict.fromkeys(('recall', 'masked', 'swapped', 'cutoff'), 0)
    for s in range(14):
        world = toy_world(s)
        got = chat_probes(world, ToyProvider(world, seed=s), recall_questions(world.trials, per=3, seed=s))
        got['cutoff'] = cutoff_gap(*toy_scores(world, seed=s), '2021-02-01', n=N)
        for k, f in got.items(): accused[k] += bool(f.found.any())
    print('accused of 14:', accused)
    assert max(accused.values()) <= 2, accused

def test_a_gap_of_noise_is_rarely_found():
    "The cutoff probe and the sentence rule on 200 studies of pure noise with few and unbalanced programs."
    hits = 0
    for s in range(200):
        r = np.random.default_rng(s); n = 120
        base = pd.DataFrame(dict(episode_id=np.arange(n), program=r.integers(0, 18, n), indication_f1=0.0,
                                 decision_date=pd.to_datetime('2019-02-01') + pd.to_timedelta(r.integers(0, 1500, n), unit='D')))
        level = r.normal(0, 0.1, 18)[base.program]
        hits += cutoff_gap(base.assign(indication_f1=level + r.normal(0, 0.3, n)), base, '2021-02-01', n=N, seed=s).found.any()
    print(f'{hits} of 200 found')
    assert hits <= 22

@pytest.fixture(scope='module')
def read():
    "Likelihoods under a language model that has read what was started, and under one that has read histories."
    core.set_threads(1)
    world = toy_world(3, programs=10)
    cases = make_cases(world.prompts, world.windows, world.programs, world.forecasts, n=30)
    return {knows: local_scores(toy_reader(world, knows), cases, 'List') for knows in (True, False)}

@pytest.mark.parametrize('probe', [masked_names, swapped_names, true_or_false])
def test_likelihoods_tell_a_language_model_that_has_read_the_portfolios(read, probe):
    knows, clean = probe(read[True], N), probe(read[False], N)
    print(*knows.verdict, *clean.verdict, sep='\n')
    assert knows.found[knows.test].any(), knows.verdict.tolist()
    assert not clean.found.any(), clean.verdict.tolist()

def test_likelihoods_tell_a_language_model_that_has_read_the_trials():
    world = toy_world(3, programs=10, per=3); facts = recall_questions(world.trials, per=3)
    knows, clean = (recall_likelihood(recall_scores(toy_reader(world, k, facts, steps=220), facts), N) for k in (True, False))
    print(*knows.verdict, *clean.verdict, sep='\n')
    # a number or year is asked by title, and so is its false twin: a memory of titles alone answers both and cancels out
    assert knows.found[knows.statistic.str.startswith(('title', 'phase'))].all() and not clean.found.any(), clean.verdict.tolist()
