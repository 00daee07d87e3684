"""llm.py from start to plot against two real servers, with tiny random models made on the spot.

    pip install "transformers[serving]"     # and, best in an environment of its own, litellm[proxy]
    python bench/llm_real_servers.py --n 40 --litellm other/bin/litellm

The servers are `transformers serve`, with a model whose generation config does not sample and one
whose does, and the proxy of LiteLLM in front of the second, which wants a key. The models speak
one word, each of the 28 acceptable answers about as likely as the other: where they sample they
are at chance, 1/4 and on relatives 1/16. Each run of llm.py is killed on the way and started once
more: the lines it had written must remain, and no settled question may be asked again. Then a
model that is not there and a key that is wrong, and Figure 2 of all.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llm import __main__ as llm
from tests.common import wait_for
from tests.scripted_server import attempts_in


HERE = Path(__file__).resolve().parents[1]


WORDS = sorted({word for name in llm.FORMULATIONS for word in llm.make_question(name, 5, 0, 0)[2]})
KEY = "sk-of-the-front-0123456789"
FRONT = """
model_list:
  - model_name: front
    litellm_params: {model: openai/sampling, api_base: "URL", api_key: none}
general_settings: {master_key: KEY}
"""


# ---- the model


def write_model(folder, samples):
    """A random LLaMA of one layer whose vocabulary are the acceptable answers."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    # the tokenizer: whole words, all others unknown
    special = ["<unk>", "<s>", "</s>"]
    vocabulary = {word: number for number, word in enumerate(special + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(["unk_token", "bos_token", "eos_token"], special, strict=True))
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    wrapped.save_pretrained(folder)

    # the model, and whether it samples
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 2048}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": len(vocabulary)}
    numbers = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **layers, **numbers)
    model = transformers.LlamaForCausalLM(config)
    how = {"do_sample": True, "top_k": 0} if samples else {}
    model.generation_config = transformers.GenerationConfig(**how, **numbers)
    model.save_pretrained(folder)


# ---- the servers and llm.py


@contextlib.contextmanager
def running(command, folder):
    """Yields the url of a server, started in the folder, once it listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if "/" in command[0]:
        command = [Path(command[0]).absolute(), *command[1:]]
    command, log = [*command, "--host", "127.0.0.1", "--port", str(port)], folder / "log"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with open(log, "w") as file:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
    try:
        wait_for(lambda: server.poll() is not None or listens(port), seconds=300)
        assert server.poll() is None, log.read_text()[-2000:]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def start(url, *arguments, key=""):
    """llm.py as a process."""
    settings = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "NO_PROXY": "127.0.0.1"}
    command, pipe = [sys.executable, llm.__file__, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | settings, stdout=pipe, stderr=pipe, text=True)


def print_run(url, model, n, path, attempts, key=""):
    """Ask, kill, go on; what came out."""
    flags = f"--model {model} --n {n} --D 5 --max-tokens 1 --attempts {attempts} --out".split()
    began, process = time.time(), start(url, *flags, path, key=key)
    wait_for(lambda: path.exists() and path.read_bytes().count(b"\n") >= 5 * n, seconds=600)
    process.kill()
    process.communicate()
    kept = path.read_bytes()
    whole_lines = kept[: kept.rfind(b"\n") + 1]

    # the same command again
    process = start(url, *flags, path, key=key)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert path.read_bytes().startswith(whole_lines), "what was answered is lost"
    questions = attempts_in(path)  # which checks that no settled question was asked again
    assert len(questions) == 5 * n
    killed = f"killed after {len(whole_lines.splitlines())} attempts and gone on"
    print(f"\nmodel {model}: {5 * n} questions in {time.time() - began:.0f} s, {killed}")
    print(out[out.index("formulation") : out.index("answers: ")], end="", flush=True)


def print_refusal(what, url, model, folder, key=""):
    process = start(url, "--model", model, "--n", 1, "--out", folder / "none", key=key)
    _, err = process.communicate()
    assert process.returncode == 2 and err.count("\n") == 1 and KEY not in err, err
    print(f"{what}: {err}", end="", flush=True)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=layout)
    p.error = lambda message: p.exit(2, f"llm_real_servers.py: {message}\n")

    def flag(name, default, help):
        help = f"{help} (default: {default})"
        p.add_argument(f"--{name}", default=default, type=type(default), help=help)

    flag("n", 40, "questions of each formulation")
    flag("transformers", "transformers", "the command, or its path")
    flag("litellm", "litellm", "the command, or its path")
    flag("out", Path("out/real_servers.png"), "the figure")
    args = p.parse_args()
    if args.n < 1:
        p.error("--n must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        paths = [folder / f"{model}.jsonl" for model in ("greedy", "sampling", "front")]
        write_model(folder / "greedy", samples=False)
        write_model(folder / "sampling", samples=True)
        with running([args.transformers, "serve", "--device", "cpu"], folder) as url:
            print("transformers serve")
            print_run(url, "greedy", args.n, paths[0], attempts=5)
            print_run(url, "sampling", args.n, paths[1], attempts=40)
            print_refusal("a model that is not there", url, "nobody", folder)

            print("\nthe proxy of LiteLLM in front of it")
            (folder / "front.yaml").write_text(FRONT.replace("URL", url).replace("KEY", KEY))
            with running([args.litellm, "--config", "front.yaml"], folder) as front:
                print_run(front, "front", args.n, paths[2], attempts=40, key=KEY)
                print_refusal("a model that is not there", front, "nobody", folder, key=KEY)
                print_refusal("a wrong key", front, "front", folder, key=KEY[::-1])
        figure = start("", "--plot", *paths, "--out", args.out)
        _, err = figure.communicate()
        assert figure.returncode == 0, err
        print(f"\n{args.out}")


if __name__ == "__main__":
    main()
