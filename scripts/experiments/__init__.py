# Copyright 2026 The ATMA team.
# Licensed under the Apache License, Version 2.0; see the file LICENSE.
"""What the scripts for data, training, evaluation and ablations share."""
