"""SGLang's Python interface: what is not served raises its sentence, and the engine goes on."""

import json
import subprocess
import sys

import pytest
from serving.prompts import prompt

SCRIPT = """
import json, sys
from dspark.host.launch import load_plugin, prepare_process

if __name__ == "__main__":
    prepare_process(["--device", "cpu"])
    load_plugin()
    import sglang
    from dspark.host.refusal import NotServed

    model, tokens = sys.argv[1], json.loads(sys.argv[2])
    engine = sglang.Engine(
        model_path=model, device="cpu", speculative_algorithm="DSPARK", log_level="error"
    )
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}

    def generate():
        return engine.generate(input_ids=tokens, sampling_params=greedy)["output_ids"]

    before, said = generate(), []
    for name, arguments in {
        "save_sharded_model": {"path": "/x", "pattern": None, "max_size": None},
        "save_remote_model": {"url": "x"},
        "update_weights_from_disk": {"model_path": "x"},
        "get_weights_by_name": {"name": "lm_head.weight"},
        "release_memory_occupation": {},
        "resume_memory_occupation": {},
    }.items():
        try:
            getattr(engine, name)(**arguments)
            said.append(f"{name} was served")
        except NotServed as refusal:
            said.append(str(refusal))
    print("FOUND", json.dumps([before, generate(), said]), flush=True)
    engine.shutdown()
"""


@pytest.mark.deep
def test_the_engine_says_what_is_not_served(tiny, tmp_path):
    script = tmp_path / "script.py"  # a worker imports its parent's main module again
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tiny), json.dumps(prompt(40, seed=1))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    before, after, said = json.loads(found[0].removeprefix("FOUND "))
    assert before == after
    assert len(said) == 6
    assert all(sentence.startswith("sglang-dspark does not serve ") for sentence in said), said
