# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""Transformers' server, as a person starts it, answers by HTTP what `generate()` says."""

import json
import os
import runpy
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "serve.py")
QUESTION = "w5 w9 w40"


@pytest.fixture
def ask(saved, tmp_path):
    """`ask(path, **fields)`: the lines of the server's answer to a POST."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [sys.executable, SCRIPT, str(saved), "--port", str(port), "--device", "cpu"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )

    def post(path: str, **fields) -> list[str]:
        body = {"model": str(saved), "max_tokens": 6, "temperature": 0, **fields}
        request = urllib.request.Request(
            f"{address}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=60).read().decode().splitlines()

    try:
        while True:
            assert server.poll() is None, (tmp_path / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        yield post
    finally:
        server.terminate()
        server.wait()
        log.close()


def test_the_server_says_what_generate_says(ask, make_model, tokenizer):
    """Completions, and chats whole and streamed, which is how `transformers chat` asks."""
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    model = make_model(eos_token_id=1)
    answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(answer)
    (line,) = ask("/v1/completions", prompt=QUESTION)
    assert json.loads(line)["choices"][0]["text"] == expected
    messages = [{"role": "user", "content": QUESTION}]
    (line,) = ask("/v1/chat/completions", messages=messages)
    assert json.loads(line)["choices"][0]["message"]["content"] == expected
    lines = ask("/v1/chat/completions", messages=messages, stream=True)
    chunks = [json.loads(x.removeprefix("data: ")) for x in lines if x.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected


def test_continuous_batching_is_refused_before_anything_is_served(monkeypatch):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "model", "--continuous-batching"])
    with pytest.raises(SystemExit, match="call generate\\(\\) on a padded batch instead"):
        runpy.run_path(SCRIPT, run_name="__main__")
