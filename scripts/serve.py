# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""`transformers serve` for an ATMA checkpoint; `transformers chat` and OpenAI clients talk to it.

    python scripts/serve.py runs/quickstart/model --port 8000

All other options are those of `transformers serve`, which by itself serves only models whose class
is in Transformers. Needs `pip install 'transformers[serving]'`.
"""

import sys

import atma
import transformers
from atma.generation_atma import NO_CONTINUOUS_BATCHING
from transformers.cli.transformers import main

if __name__ == "__main__":
    if "--continuous-batching" in sys.argv:
        raise SystemExit(NO_CONTINUOUS_BATCHING)
    # The server looks for the class that a checkpoint names in this namespace.
    transformers.AtmaForCausalLM = atma.AtmaForCausalLM
    sys.argv.insert(1, "serve")
    main()
