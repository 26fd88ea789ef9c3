"What the DVC graph makes does not depend on when, where and over what it is made: byte by byte."
import pytest

from conftest import run
from tiny import MADE, digests, whole_run

@pytest.fixture(scope='module')
def again(tmp_path_factory): return whole_run(tmp_path_factory, 'second')

def test_another_run_gives_the_same_bytes(again, tmp_path_factory):
    "Another copy of the project, in another folder, made by another process at the same time."
    after, before = again[1], whole_run(tmp_path_factory, 'first')[1]
    assert {'items', 'select', 'anchors', 'weights', 'index', 'agents', 'probes'} <= {f.split('/')[1] for f in before}, 'each folder holds something to compare'
    assert {k for k in before | after if before.get(k) != after.get(k)} == set()

def test_forced_rerun_gives_the_same_bytes(again):
    "Stages that find what they made before: DVC keeps it (persist), or it lies in .cache."
    root, before = again
    run(root, 'dvc', 'repro', '-f', '-s', 'encode', 'items', 'train', 'agents', 'evaluate', 'report', check=True)
    after = digests(root, *MADE)
    assert {k for k in before | after if before.get(k) != after.get(k)} == set()
