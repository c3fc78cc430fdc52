"""The server against its own OpenAPI document, by schemathesis, which makes requests of it that are right and wrong in every way."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serving import serving

pytest.importorskip("schemathesis")

# But for the check that whatever the document allows is accepted: no JSON schema says which tokens a model has.
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,"
    "negative_data_rejection,missing_required_header,unsupported_method,ignored_auth"
)


@pytest.mark.parametrize("with_keys", [False, True])
def test_it_does_what_it_says(directory, tmp_path, with_keys):
    (tmp_path / "keys").write_text("a-key\n")
    words = ["--api-keys", str(tmp_path / "keys")] if with_keys else []
    with serving(directory, "--adapters-dir", str(tmp_path), "inference.dtype=fp32", *words) as server:
        given = ["-H", "Authorization: Bearer a-key"] if with_keys else []
        options = ["--checks", CHECKS, "--max-examples", "4" if with_keys else "12", "--seed", "1", "--phases", "coverage,fuzzing"]
        words = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{server.url}/openapi.json"]
        found = subprocess.run([*words, *options, *given, "--continue-on-failure"], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout[-6000:] + found.stderr
        assert " generated" in found.stdout
        assert not [line for line in server.log if line.get("status") == 500]
        if not with_keys:
            server.idle()
