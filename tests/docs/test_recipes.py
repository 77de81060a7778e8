"""The recipes for clusters fit the schema of Kubernetes; the jobs of GitHub Actions are whole."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml

_PAGE = Path(__file__).parents[2] / "docs" / "guide" / "recipes.md"
_WORKFLOWS = Path(__file__).parents[2] / ".github" / "workflows"
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODELS = {"Service": "V1Service", "Job": "V1Job"}


def _blocks(language: str) -> list[str]:
    return [text for found, text in _BLOCK.findall(_PAGE.read_text()) if found == language]


def _documents() -> dict[str, dict[str, Any]]:
    found = [d for block in _blocks("yaml") for d in yaml.safe_load_all(block)]
    return {document["kind"]: document for document in found}


def _check(value: Any, kind: str, where: str) -> None:
    """Fails unless a value fits a type of the Kubernetes API, with no field it does not know."""
    if inner := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            _check(item, inner[1], f"{where}[{index}]")
    elif inner := re.fullmatch(r"[Dd]ict[\[(]str, (.*)[\])]", kind):
        assert isinstance(value, dict), where
        for key, item in value.items():
            _check(item, inner[1], f"{where}.{key}")
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, f"{where}: {value!r} is no {kind}"
    else:
        _check_fields(value, getattr(kubernetes.client, kind), where)


def _check_fields(value: Any, model: Any, where: str) -> None:
    names = {written: name for name, written in model.attribute_map.items()}
    assert isinstance(value, dict) and value.keys() <= names.keys(), f"{where}: {value}"
    for key, item in value.items():
        _check(item, model.openapi_types[names[key]], f"{where}.{key}")
    # The constructor checks that what is required is given.
    model(**{names[key]: item for key, item in value.items()})


@pytest.mark.parametrize("kind", _MODELS)
def test_kubernetes_accepts(kind: str) -> None:
    _check(_documents()[kind], _MODELS[kind], kind)


def test_a_misspelt_field_is_noticed() -> None:
    document = _documents()["Job"]
    document["spec"]["completionmode"] = "Indexed"
    with pytest.raises(AssertionError, match=r"Job\.spec"):
        _check(document, "V1Job", "Job")


def test_the_pods_describe_the_cluster() -> None:
    """The shell makes a TF_CONFIG that names every pod of the Job, in each of them."""
    spec = _documents()["Job"]["spec"]
    script = spec["template"]["spec"]["containers"][0]["args"][0]
    script = script.replace("exec python train.py", 'echo "$TF_CONFIG"')
    for index in range(spec["completions"]):
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        out = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, check=True)
        config = json.loads(out.stdout)
        assert config["task"] == {"type": "worker", "index": index}
        pods = [f"train-{pod}.train:2222" for pod in range(spec["completions"])]
        assert config["cluster"]["worker"] == pods


@pytest.mark.parametrize("script", _blocks("bash"))
def test_scripts_can_be_parsed(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)


@pytest.mark.parametrize("path", sorted(_WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_jobs_can_be_parsed(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    makefile = (_WORKFLOWS.parents[1] / "Makefile").read_text()
    for job in workflow["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for target in re.findall(r"^make ([a-z-]+)", step.get("run", "")):
                assert f"\n{target}: " in makefile
