"Probes find what was planted, in chat models and in a language model, and rarely find what is not there."
import re
from types import SimpleNamespace

import numpy as np, pandas as pd, pytest, torch
from scipy.stats import binomtest

from clinical_rl import agents, core, policy, probes
from clinical_rl.probes import ToyProvider, chat_scores, cutoff_gap, local_scores, make_cases, masked_names, recall, \
    recall_answers, recall_likelihood, recall_questions, recall_scores, summary, swapped_names, toy_reader, toy_scores, toy_world, true_or_false
from clinical_rl.prompts import parse_portfolio

N = 500 # resamples

@pytest.fixture(scope='module')
def world(): return toy_world(7)

def cases_of(world, **kw): return make_cases(world.prompts, world.windows, world.programs, world.forecasts, n=40, **kw)

def chat_probes(world, provider, questions):
    scores = chat_scores(provider, cases_of(world))
    return dict(recall=recall(recall_answers(provider, questions), N), masked=masked_names(scores, N),
                swapped=swapped_names(scores, N))

def test_every_probe_finds_a_chat_model_that_knows(world):
    # may miss: a memory that needs more of a title than four words in five, or that answers alike under any name
    got = chat_probes(world, ToyProvider(world, knows=True), recall_questions(world.trials, per=4))
    got['cutoff'] = cutoff_gap(*toy_scores(world, 0.7), '2021-02-01', n=N)
    for name, f in got.items(): assert f.found[f.test].all(), (name, f.verdict.tolist())
    assert summary(pd.concat([f.assign(model='m') for f in got.values()])).found.tolist() == [True]*4

def test_facts_are_recalled_by_their_own_key(world):
    "Who knows trials by their titles alone shows in the numbers; who knows them by number, in titles and phases."
    # may miss: a memory keyed by neither, such as the sponsor and the year
    questions = recall_questions(world.trials, per=4)
    class Keyed(ToyProvider):
        def _fact(self, q): return super()._fact(q) if bool(re.search(r'NCT\d', q)) == self.by_number else 'unknown'
    def tested(by_number):
        p = Keyed(world, knows=True); p.by_number = by_number
        f = recall(recall_answers(p, questions), N)
        assert f.test.all()
        return {s.split(',')[0] for s in f.statistic[f.found]}
    assert tested(True) == {'title', 'phase'} and tested(False) == {'number', 'month'}

def test_a_clean_chat_model_is_rarely_accused():
    "Fourteen worlds, each with another model: a probe that tests at 5 % may accuse one or two, not three."
    # may miss: an error rate of up to about twice what is promised, and errors that need the dependence of real windows
    accused = dict.fromkeys(('recall', 'masked', 'swapped', 'cutoff'), 0)
    for s in range(14):
        world = toy_world(s)
        got = chat_probes(world, ToyProvider(world, seed=s), recall_questions(world.trials, per=3, seed=s))
        got['cutoff'] = cutoff_gap(*toy_scores(world, seed=s), '2021-02-01', n=N)
        for k, f in got.items(): accused[k] += bool(f.found.any())
    print('accused of 14:', accused)
    assert max(accused.values()) <= 2, accused

def test_a_number_is_not_accused_of_its_date():
    "A model that knows from a title when a trial was registered, and so how its number begins, has not read the number."
    # may miss: registry numbers that end alike for some reason other than chance
    found = 0
    for s in range(14):
        world = toy_world(s); questions = recall_questions(world.trials, per=3, seed=s); rng = np.random.default_rng(s)
        true = dict(zip(questions.question, questions.truth))
        def chat(messages, tools=None):
            q = messages[-1]['content']
            return SimpleNamespace(text=f'{true[q][:-4]}{rng.integers(10**4):04d}' if 'number' in q else 'unknown')
        f = recall(recall_answers(SimpleNamespace(chat=chat), questions), N); found += f.found.any()
    assert found <= 2

def test_the_season_is_no_memory():
    "A model that knows which months are common, and the month of a drug's first trial, has not read when a trial started."
    # may miss: sponsors that start their trials in months of their own and are told by a title
    found = 0
    for s in range(14):
        world = toy_world(s); questions = recall_questions(world.trials, per=3, seed=s); rng = np.random.default_rng(s)
        first = world.trials.sort_values('event_date').drop_duplicates('drugs').set_index('drugs').start_date.dt.strftime('%B')
        def chat(messages, tools=None):
            q = messages[-1]['content']
            drug = next((d for d in first.index if d in q), None)
            return SimpleNamespace(text=rng.choice([first[drug], 'January', 'January', 'September']) if 'month' in q else 'unknown')
        found += recall(recall_answers(SimpleNamespace(chat=chat), questions), N).found.any()
    assert found <= 2

def test_a_start_that_is_not_stated_is_not_asked(world):
    trials = world.trials.assign(start_date=world.trials.start_date.where(world.trials.index % 6 < 2)) # two of a program's six
    assert set(recall_questions(trials).fact) == {'title', 'phase', 'number'}
    trials = world.trials.assign(start_date=world.trials.start_date.where(world.trials.index % 6 > 2)) # three, and those are chosen
    assert recall_questions(trials, per=3).fact.value_counts().nunique() == 1

def test_failed_calls_are_left_out(world):
    "An endpoint that fails every third time: what it didn't say counts neither for nor against memory."
    # may miss: calls that fail more often where the model remembers
    inner, calls = ToyProvider(world, knows=True), []
    def chat(messages, tools=None):
        calls.append(1)
        if len(calls) % 3 == 0: raise agents.CallError('503')
        return inner.chat(messages)
    provider = SimpleNamespace(chat=chat)
    answers = recall_answers(provider, recall_questions(world.trials, per=4))
    cases = cases_of(world); scores = chat_scores(provider, cases)
    asked = 2*len(answers) + 3*len(cases); assert len(calls) == asked
    told = scores.drop_duplicates(['episode_id', 'name']).score
    assert answers[['answer', 'false_answer']].isna().sum().sum() + told.isna().sum() == asked//3
    for f in (recall(answers, N), masked_names(scores, N)):
        assert f.found[f.test].all() and (f.n[f.test] > 0).all() and f.value.notna().all()
    dead = SimpleNamespace(chat=lambda *a, **k: (_ for _ in ()).throw(agents.CallError('503')))
    f = recall(recall_answers(dead, recall_questions(world.trials, per=3)), N)
    assert not f.test.any() and f.verdict.str.contains('not measured').all() # and is no test that could be counted

def test_what_asking_may_cost():
    # may miss: a vendor that charges for tries that came to nothing, and one token a character
    spec = agents.AgentSpec('m', 'm', 'http://127.0.0.1/v1', price_in=1, price_out=10, max_tokens=1000)
    talks = [probes.conversation('s'*300, 'q'*300)]*50
    assert 50*1000*10/1e6 + 50*200/1e6 <= probes.worst_case(spec, talks) < 50*1000*10/1e6 + 50*300/1e6

def test_only_what_can_have_been_read_is_asked(world):
    # may miss: trials that were public before they were registered, and a cutoff that its makers state wrongly
    until = '2021-02-01'
    ends = world.windows.set_index('episode_id').window_end
    end = ends[cases_of(world, until=until).episode_id]
    assert (end <= until).all() and (end == until).any()
    dates = world.trials.set_index('nct_id').event_date
    assert (dates[recall_questions(world.trials, until='2015-06-01').nct_id] <= '2015-06-01').all()
    for ask in (lambda: cases_of(world, until='2000-01-01'), lambda: recall_questions(world.trials, until='2000-01-01')):
        with pytest.raises(core.DataError, match='2000-01-01'): ask()

def noise(s, programs=18, n=120): # scores of a model that has learnt nothing, and of a baseline
    r = np.random.default_rng(s)
    base = pd.DataFrame(dict(episode_id=np.arange(n), program=r.integers(0, programs, n), indication_f1=0.0,
                             decision_date=pd.to_datetime('2019-02-01') + pd.to_timedelta(r.integers(0, 1500, n), unit='D')))
    return base.assign(indication_f1=r.normal(0, 0.1, programs)[base.program] + r.normal(0, 0.3, n)), base

def test_a_gap_of_noise_is_rarely_found():
    "The cutoff probe and the sentence rule on 200 studies of pure noise with few and unbalanced programs."
    # may miss: error rates between 5 and 11 %, and a change of the world that favours one kind of model, for which controls stand
    got = [cutoff_gap(*noise(s), '2021-02-01', n=N, min_programs=10, seed=s) for s in range(200)]
    hits = sum(f.found.any() for f in got)
    print(f'{hits} of 200 found'); assert all(f.test.any() for f in got)
    assert hits <= 22

def test_a_gap_counts_only_above_that_of_methods_that_read_nothing(world):
    # may miss: a memory that is smaller than what the world's change does to other methods; it can't be told from that
    model, base = toy_scores(world, 0.8)
    gap = lambda *controls, **kw: cutoff_gap(model, base, '2021-02-01', controls=controls, n=N, **kw).iloc[-1]
    alone, f = gap(), gap(-5.0, 2.0)
    assert f.found and '-5.0 to +2.0' in f.verdict and f.detectable == alone.detectable + 2
    assert not gap(-5.0, alone.lo + 0.1).found and gap(np.nan, -5.0).found
    assert gap(-5.0).detectable == alone.detectable, 'a floor below zero helps nobody'

def test_a_gap_with_few_programs_is_not_measured(world):
    # may miss: many programs of which all but a few have hardly any window
    model, base = toy_scores(world, 0.8)
    one_side = (model.decision_date < '2021-02-01') | model.program.isin(sorted(set(model.program))[:5])
    f = cutoff_gap(model[one_side], base, '2021-02-01', n=N).iloc[-1]
    assert not f.test and not f.found and f.n == 0 and np.isnan([f.value, f.p_holm, f.detectable, f.by_heart]).all()
    assert '5 programs only, fewer than 15' in f.verdict
    assert cutoff_gap(model[one_side], base, '2021-02-01', n=N, min_programs=5).iloc[-1].test

@pytest.fixture(scope='module')
def read():
    "Likelihoods under a language model that has read what was started in the last windows, and under one that has read histories; each window lends several names."
    core.set_threads(1)
    world = toy_world(3); last = world.windows.decision_date == world.windows.decision_date.max()
    late = SimpleNamespace(**vars(world) | dict(prompts=world.prompts[last], windows=world.windows[last]))
    cases = pd.concat([make_cases(late.prompts, world.windows, world.programs, world.forecasts, seed=k) for k in range(4)]).drop_duplicates(['episode_id', 'partner'])
    return {knows: local_scores(toy_reader(late, knows, steps=250, lr=5e-3), cases, 'List') for knows in (True, False)}

@pytest.mark.parametrize('probe', [masked_names, swapped_names, true_or_false])
def test_likelihoods_tell_a_language_model_that_has_read_the_portfolios(read, probe):
    # may miss: a memory among many others in a large model, which moves a likelihood less than 250 steps on 20 windows do
    knows, clean = probe(read[True], N), probe(read[False], N)
    print(*knows.verdict, *clean.verdict, sep='\n')
    assert knows.found[knows.test].all(), knows.verdict.tolist()
    assert not clean.found.any(), clean.verdict.tolist()

@pytest.fixture(scope='module')
def asked():
    core.set_threads(1)
    world = toy_world(3, programs=10, per=3)
    return world, recall_questions(world.trials, per=3)

def test_likelihoods_tell_a_language_model_that_has_read_the_trials(asked):
    # may miss: a memory that no wording like that of the questions wakes, for this one learned questions that lack two words
    world, facts = asked
    knows, clean = (recall_likelihood(recall_scores(toy_reader(world, k, facts, steps=240), facts), N) for k in (True, False))
    print(*knows.verdict, *clean.verdict, sep='\n')
    assert knows.found[knows.test].all() and knows.test.sum() == 4 and not clean.found.any(), clean.verdict.tolist()

def taught(local, questions, knows, steps=220, seed=0):
    "Let the adapter of a Local, which only writes, learn some facts, or as many wrong ones."
    rng, lora = np.random.default_rng(seed), [p for n, p in local.policy.model.named_parameters() if 'lora_' in n]
    truth = questions.truth if knows else questions.groupby('fact').truth.transform(lambda x: rng.permutation(x))
    pairs = [(local.ids(probes.conversation(probes.RECALL, q)), local.tokens(f'Phase {a}' if f == 'phase' else a)) for q, f, a in zip(questions.question, questions.fact, truth)]
    opt = torch.optim.Adam(lora, lr=1e-2)
    for _ in range(steps):
        prompts, answers = zip(*(pairs[i] for i in rng.choice(len(pairs), 24, replace=False)))
        prefix = local.read(prompts); [p.requires_grad_(True) for p in lora]
        h = local._run(local._pad([[p[-1], *a[:-1]] for p, a in zip(prompts, answers)]), torch.tensor([[len(p) - 1] for p in prompts]), prefix)
        loss = torch.nn.functional.cross_entropy(local._logits(h).flatten(0, 1), local._pad(answers, -100).flatten())
        opt.zero_grad(); loss.backward(); opt.step()
    local.policy.model.requires_grad_(False)

def test_recall_tells_which_adapter_has_read_the_trials(asked):
    "Two adapters of one base that read every question alike: one has learned what it is asked, the other as many wrong facts."
    # may miss: a memory in an adapter that learned portfolios and was never made to write such answers
    world, facts = asked
    base = toy_reader(world, facts=facts, steps=60)
    lora = SimpleNamespace(layers=2, rank=16, alpha=32, dropout=0.0, modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'])
    model = policy.add_adapter(base.policy.base, lora, 1, 'planted'); model.add_adapter('clean', model.peft_config['planted'])
    models = {n: probes.Local(policy.Policy(model, base.policy.grammar, 2), base.tokenizer, n) for n in ('', 'planted', 'clean')}
    for name, knows in (('planted', True), ('clean', False)):
        model.set_adapter(name); taught(probes.Local(models[name].policy, base.tokenizer), facts, knows)
    scores = recall_scores(lambda: models, facts)
    found = {name: recall_likelihood(s, N) for name, s in scores.groupby('model')}
    for name, f in found.items(): print(name, *f.verdict, sep='\n')
    assert found['planted'].found.all() and not found['clean'].found.any() and not found[''].found.any()

class Guesser:
    "Likelihoods without a language model: base rates of every name, a liking for the history, and whims for names, questions and answers."
    def __init__(self, world, seed, knows=1.0):
        self.rng, self.whims, self.knows = np.random.default_rng(seed), {}, knows
        odds = lambda p: np.log(p/(1 - p))
        self.odds = {p: {(f['indication'], f['phase']): odds(f['p']) for f in world.forecasts[e]} for e, p in zip(world.windows.episode_id, world.windows.program)}
        self.any = pd.DataFrame(self.odds).mean(axis=1).to_dict() # what an invented name calls up
    def whim(self, *key): # tails are heavy
        if key not in self.whims: self.whims[key] = 0.3*self.rng.standard_t(3)
        return self.whims[key]
    def score(self, text, answer):
        if isinstance(answer, str): return self.whim(answer) + self.whim(text, answer)
        head, _, history = text.partition('\n'); name = head[11:].split(',')[0]
        past = {i[:2] for i in parse_portfolio(history.partition('Last window:\n')[2])[0]}
        like = lambda i: self.knows*self.odds.get(name, self.any).get(i[:2], -5) + 0.3*(i[:2] in past) + self.whim(i[:2]) + self.whim(name, i[:2]) + 0.3*self.whim(text, i)
        return np.mean([like(i) for i in answer])
    def likelihoods(self, models, asked, *more): return {'': [[self.score(m[-1]['content'], x) for x in xs] for m, xs in asked]}

def test_likelihoods_rarely_accuse_who_knows_base_rates_only(monkeypatch):
    "200 readers that know how often each name starts what, and no window or trial, in ten worlds: as many windows and trials as in the default run."
    # may miss: error rates up to about twice the nominal ones, and base rates that a reader knows better than the baseline that makes the false portfolios
    hits, n = dict.fromkeys(('masked names', 'swapped names', 'true or false', 'recall'), 0), 20
    for s in range(10):
        world = toy_world(s, per=3)
        cases, questions = make_cases(world.prompts, world.windows, world.programs, world.forecasts, n=24), recall_questions(world.trials, per=3)
        for k in range(n):
            monkeypatch.setattr(probes, 'likelihoods', Guesser(world, [s, k]).likelihoods)
            scores = local_scores(None, cases)
            for f in (*(probe(scores, N) for probe in (masked_names, swapped_names, true_or_false)), recall_likelihood(recall_scores(None, questions), N)):
                hits[f.probe[0]] += f.found.any()
    for probe, k in hits.items():
        low, high = binomtest(k, 10*n).proportion_ci(method='wilson')
        print(f'{probe}: {k} of {10*n} found, {100*k/10/n:.1f} % [{100*low:.1f}, {100*high:.1f}] of nominally at most 5 %')
        assert low <= 0.05, (probe, k)

def test_clean_language_models_are_rarely_accused():
    "Six worlds, each with another language model that has learned as many wrong facts."
    # may miss: error rates up to five times what is promised
    found = []
    for s in range(6):
        world = toy_world(s, programs=10, per=3); facts = recall_questions(world.trials, per=3, seed=s)
        found.append(recall_likelihood(recall_scores(toy_reader(world, facts=facts, steps=60, seed=s), facts), N).found.any())
    assert sum(found) <= 1
