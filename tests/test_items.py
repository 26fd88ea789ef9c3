"Item policies: the real base model's queries, and that nothing of held-out or later windows reaches a forecast."
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from conftest import ROOT
from clinical_rl import core, items, policy
from clinical_rl.features import Block
from clinical_rl.prompts import SYSTEM, prompt_ids
from test_policy import PROMPT, base_dir # noqa: F401, a fixture

def test_queries_equal_the_plain_forward_pass(base_dir, tmp_path): # noqa: F811
    "On the real model in float32, a cached query leaves its layers as it would behind the whole prompt, read without cache."
    base, tok = policy.load_base(base_dir, 'float32')
    cfg, codes = core.load_params(ROOT/'params.yaml').items, ['NSCLC', 'MELANOMA', 'AML']
    frozen, adapted = policy.query_layers(base, cfg)
    cache, prompts = policy.PromptCache(tmp_path), {f'{i:04d}': prompt_ids(t, tok, SYSTEM.format(6)) for i, t in enumerate([PROMPT, PROMPT*3])}
    for k, p in prompts.items(): cache.put(k, policy.encode_window(base, p, queries=policy.query_embeddings(base, tok, codes), asked=(frozen, adapted)))
    asked = [items.Asked(k, None, None, None, names, k) for k, names in zip(prompts, (['AML', 'NSCLC'], ['MELANOMA', 'AML']))]
    with torch.no_grad():
        got = items.ItemPolicy(items.Head(3, base.config.hidden_size, 4), base, adapted, cache, codes).states(asked)
        for e, states in zip(asked, got):
            for name, h in zip(e.names, states):
                x = torch.cat([base.model.embed_tokens(torch.tensor(prompts[e.key][:-1])), policy.query_embeddings(base, tok, [name])])[None]
                plain = policy.run_layers(base, x, torch.arange(x.shape[1])[None], range(cfg.depth))[0, -1]
                assert (h - plain).abs().max() < 1e-3*plain.abs().max()

def material(folder, n=120, change=lambda w, X, y: None):
    "A made-up split of six programs; `change` may alter windows, features and truth."
    rng = np.random.default_rng(0); pairs = [(i, p) for i in ('AML', 'CLL', 'NSCLC') for p in ('2', '3')]
    w = pd.DataFrame(dict(episode_id=[f'landscape:x{k % 6}:{k}' for k in range(n)], program=[f'x{k % 6}' for k in range(n)], empty=False,
                          part=['test' if k % 6 == 5 else 'val' if k % 6 == 4 else 'train' for k in range(n)],
                          decision_date=[pd.Timestamp('2010-02-01') + pd.DateOffset(months=6*(k//6)) for k in range(n)]))
    w['window_end'] = w.decision_date + pd.DateOffset(months=6)
    X = rng.normal(size=(n, 6, 2)).astype(np.float32); X[..., 1] = np.tile([3, 5], 3)
    y = (rng.random((n, 6)) < 1/(1 + np.exp(1 - 2*X[..., 0]))).astype(int)
    change(w, X, y)
    params = core.load_params(ROOT/'params.yaml')
    params = params.model_copy(update=dict(items=params.items.model_copy(update=dict(queries=2, hidden=8))))
    p = np.full(n*6, .3)
    return items.Material(Block(w, pairs, ['any_pair_18', 'phase_rank'], X, y, np.zeros((n, 6), np.int8)), pd.DataFrame(dict(p=p, forward=p)), {}, None, None, [],
                          params, Path(folder)/'checkpoints')

def one_job(m, folder):
    train = m.block.windows[m.block.windows.part == 'train']
    return dict(scope='landscape', split='drug', form='features', objective='bc', seed=1, lr=1e-2, weights=train[['episode_id']].assign(weight=1.), folder=folder/'run',
                base=dict(id='none', sha256=''))

def forecast(m, folder):
    return pd.Series(items.run(m, one_job(m, folder))['item_probs'], index=m.block.windows.episode_id[m.block.windows.part.isin(['val', 'test'])])

def test_a_planted_held_out_program_moves_no_other_forecast(tmp_path):
    def plant(w, X, y): held = (w.program == 'x5').to_numpy(); X[held] = 77; y[held] = 1
    plain, planted = (forecast(material(tmp_path/k, change=f), tmp_path/k) for k, f in dict(a=lambda *x: None, b=plant).items())
    other = ~plain.index.str.contains('x5')
    assert plain[other].tolist() == planted[other].tolist() and plain[~other].tolist() != planted[~other].tolist()

def test_later_windows_move_no_forecast_at_an_origin(tmp_path):
    dates = ['2014-02-01', '2015-02-01', '2016-02-01']
    def later(w, X, y): late = (w.window_end > pd.Timestamp('2016-02-01')).to_numpy(); y[late] = 1 - y[late]
    got = []
    for k, change in dict(a=lambda *x: None, b=later).items():
        m = material(tmp_path/k, change=change); m.block.windows['part'] = 'train'
        rows = items.origin_rows(m.block.windows, dates, 12)[pd.Timestamp('2016-02-01')]
        got.append(items.try_setting(m, dict(form='features', lr=1e-2, origin=pd.Timestamp('2016-02-01'), rows=rows, seed=1)))
    assert got[0]['items_head'] == got[1]['items_head'] and got[0]['loss_head'].tolist() != got[1]['loss_head'].tolist()

@pytest.mark.parametrize('spoil, says', [
    (lambda job: job.update(weights=job['weights'].drop(job['weights'].index[3])), 'lack window landscape:x3:3'),
    (lambda job: job.update(lr=float('inf')), 'lower train.lr'),
])
def test_what_goes_wrong_is_named(tmp_path, spoil, says):
    m = material(tmp_path); job = one_job(m, tmp_path); spoil(job)
    with pytest.raises(core.DataError, match=says): items.run(m, job)
    assert not (tmp_path/'run').exists()
