"""What the package says of itself."""

import re
import tomllib
from pathlib import Path

import pytest
import typed_program
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
JOBS = {
    f"{path.stem}/{name}": job
    for path in sorted(ROOT.glob(".github/workflows/*.yml"))
    for name, job in yaml.safe_load(path.read_text())["jobs"].items()
}
STEPS = [step for job in JOBS.values() for step in job["steps"]]
SCRIPTS = "\n".join(step["run"] for step in STEPS if "run" in step)


def test_core_dependencies_are_four():
    assert {re.match(r"[\w-]+", line).group() for line in PROJECT["dependencies"]} == {"jax", "jaxlib", "optax", "chex"}


def test_packages_are_typed():
    assert (ROOT / "jmp_amp/py.typed").exists()
    assert (ROOT / "pallas_kernels/py.typed").exists()


def test_examples_are_short():
    for path in ROOT.glob("examples/*.py"):
        if path.name not in ("train_gpt.py", "grpo_float16.py", "finetune_8b.py"):  # which save and resume, or sample
            assert len(path.read_text().splitlines()) < 150, path.name


@pytest.mark.usefixtures("users_code")
def test_typed_program_runs():
    typed_program.main()


def test_readme_is_short_and_names_the_pythons_and_the_jax_that_are_declared():
    readme = (ROOT / "README.md").read_text()
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    oldest_jax = next(line.removeprefix("jax>=") for line in PROJECT["dependencies"] if line.startswith("jax>="))
    pinned_jax = re.search(r"^jax==(.*)$", (ROOT / ".ci/constraints.txt").read_text(), re.M).group(1)
    newer = " and ".join(PYTHONS[1:])
    assert f"Python {PYTHONS[0]} stops at JAX {pinned_jax}; Python {newer} take JAX {oldest_jax} or newer." in readme
    assert len(readme.splitlines()) <= 80


def test_citation_has_the_required_fields():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["authors"] == PROJECT["authors"]
    assert citation["license"] == PROJECT["license"]


def test_workflows_run_on_the_pythons_that_are_declared():
    assert JOBS["release/test"]["strategy"]["matrix"]["python"] == PYTHONS
    setup = next(step["with"] for step in JOBS["ci/run"]["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["python-version"].split() == PYTHONS


def test_workflows_test_the_flags_that_ci_run_tests():
    flags = re.search(r"for flag in (.*); do", (ROOT / ".ci/run").read_text()).group(1).split()
    assert JOBS["ci/jax"]["strategy"]["matrix"]["flag"] == ["", *(f"{flag}=1" for flag in flags)]


def test_workflows_name_what_exists():
    for path in re.findall(
        r"(?<!\S)(?:\$GITHUB_WORKSPACE/)?((?:\.ci|tests|jmp_amp|pallas_kernels)(?:/[\w./]+)?)", SCRIPTS
    ):
        assert (ROOT / path).exists(), path
    for extras in re.findall(r"pip install .*\[([\w,]+)\]", SCRIPTS):
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    pinned = re.findall(r"^([\w-]+)==", (ROOT / ".ci/constraints.txt").read_text(), re.M)
    by_name = {name for line in re.findall(r"pip install -c \S+ ([a-z].*)", SCRIPTS) for name in line.split()}
    assert {"build", "twine", "pytest"} <= by_name <= set(pinned)


def test_workflows_may_do_little():
    for path in ROOT.glob(".github/workflows/*.yml"):
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}, path.name
    assert {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job} == {
        "docs/deploy": {"pages": "write", "id-token": "write"},
        "release/publish": {"id-token": "write"},
    }
    assert all(re.search(r"@(v\d+|release/v\d+)$", step["uses"]) for step in STEPS if "uses" in step)


def test_a_release_is_published_after_its_tests():
    assert JOBS["release/publish"]["needs"] == "test"
    assert JOBS["release/test"]["needs"] == "build"
    assert JOBS["release/publish"]["environment"] == "pypi"
