"Every library notebook is a test: its example cells run in a fresh namespace."
from pathlib import Path

import pytest
from nbdev.test import test_nb as run_nb

NBS = Path(__file__).parent.parent/'nbs'
run_nb.__test__ = False
LIBRARY = sorted(p for p in NBS.rglob('*.ipynb') if p.parent.name != 'stages' and '.ipynb_checkpoints' not in p.parts)

@pytest.mark.parametrize('nb', LIBRARY, ids=lambda p: str(p.relative_to(NBS)))
def test_notebook(nb, capfd):
    ok, _ = run_nb(nb)
    assert ok, f'{nb.name} failed:\n{capfd.readouterr().err[-4000:]}'
