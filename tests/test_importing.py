"""What importing the package changes and costs, seen in one process of its own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

SEEN = """
import json, sys, time
import rope_patch
seen = {"lazy": "torch" not in sys.modules and dir(rope_patch)[:1] == ["ALiBi"]}

import torch, transformers
from transformers import CONFIG_MAPPING, LlamaForCausalLM
from transformers import cache_utils, conversion_mapping, masking_utils, modeling_rope_utils, modeling_utils
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES
from transformers.models.llama import modeling_llama
from transformers.models.gemma3 import modeling_gemma3

modules = [transformers.PreTrainedModel, transformers.PreTrainedConfig, transformers.GenerationMixin, torch.nn.Module]
modules += [cache_utils, masking_utils, modeling_rope_utils, modeling_utils, modeling_llama, modeling_gemma3]

def state():
    registries = {
        "attention": {key: id(modeling_utils.ALL_ATTENTION_FUNCTIONS[key])
                      for key in modeling_utils.ALL_ATTENTION_FUNCTIONS},
        "masks": {key: id(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[key])
                  for key in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS},
        "rope": {key: id(value) for key, value in modeling_rope_utils.ROPE_INIT_FUNCTIONS.items()},
    }
    for owner in modules:
        registries[str(owner)] = {key: id(value) for key, value in vars(owner).items()}
        for cls in filter(lambda value: isinstance(value, type), list(vars(owner).values())):
            registries[f"{owner} {cls}"] = {key: id(value) for key, value in vars(cls).items()}
    return registries

def registered():
    places = [CONFIG_MAPPING, conversion_mapping.USER_REGISTERED_MAPPINGS]
    return ["baichuan" in place for place in places] + sorted(REGISTERED_TOKENIZER_CLASSES)

state()  # filling lazy attributes
before = state()
start = time.process_time()
from rope_patch import patch  # the public names are loaded with the first of its names
seen["seconds"] = time.process_time() - start
after = state()
seen["changed"] = [key for key in before if before[key] != after[key]]

import rope_patch.models.baichuan
seen["before"] = registered()
seen["models"] = [name for name in sys.modules if name.startswith("rope_patch.models.baichuan.model")]
rope_patch.models.baichuan.register_baichuan()
rope_patch.models.baichuan.register_baichuan()
seen["registered"] = registered()
print(json.dumps(seen))
"""


@functools.cache
def seen() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_changes_nothing_in_transformers():
    assert seen()["changed"] == []


ENTRIES = """
import json, sys
{first}
from transformers import masking_utils, modeling_utils
registries = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, modeling_utils.ALL_ATTENTION_FUNCTIONS
finders = [type(finder).__module__ for finder in sys.meta_path]
print(json.dumps([sorted(registry) for registry in registries] + ["rope_patch.naming" in finders]))
"""


def entries(first: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", ENTRIES.format(first=first)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_enters_one_name_in_two_registries_and_nothing_else():
    plain, ours = entries("pass"), entries("import rope_patch")
    assert [sorted({*registry, "rope_patch"}) for registry in plain[:2]] == ours[:2]
    assert not any("rope_patch" in registry for registry in plain[:2])
    assert ours[2] is False  # what waited for Transformers is gone


def test_it_costs_what_transformers_costs():
    assert seen()["lazy"]
    assert seen()["seconds"] < 0.8  # 0.1 on a machine that is quiet


def test_baichuan_is_registered_when_it_is_asked_for():
    assert seen()["before"] == [False, False]
    assert seen()["models"] == []
    assert seen()["registered"] == [True, True, "BaiChuanTokenizer", "BaichuanTokenizer"]
