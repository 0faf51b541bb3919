"""The Dockerfile, the extras and the code name the same versions of the upstreams."""

import re
import sys
from pathlib import Path

from packaging.requirements import Requirement

from psrl.integrations.verl import compat

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")


def test_dockerfile_installs_the_versions_that_the_code_is_for():
    assert re.findall(r"megatron-core==([\d.]+)", DOCKERFILE) == [compat.MEGATRON_CORE]
    assert set(re.findall(r"verl\[\$\{ROLLOUT\}\]==([\d.]+)", DOCKERFILE)) == {compat.VERL}


def test_dockerfile_patches_the_upstreams_and_ends_with_the_doctor():
    assert "scripts/apply_patches.sh" in DOCKERFILE and "pip check" in DOCKERFILE
    assert re.findall(r"^RUN (.*)$", DOCKERFILE, re.MULTILINE)[-1] == "psrl doctor"


def test_extras_name_the_version_of_verl_that_the_code_is_for():
    pins = {str(r.specifier) for extra in EXTRAS.values() for r in map(Requirement, extra) if r.name == "verl"}
    assert pins == {f"=={compat.VERL}"}


def test_dockerfile_compiles_transformer_engine_in_the_range_of_the_extra():
    (wanted,) = [text for text in EXTRAS["gpu"] if text.startswith("transformer-engine")]
    assert f'"{wanted}"' in DOCKERFILE
