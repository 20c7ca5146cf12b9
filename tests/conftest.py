"""One thread for every test: on a busy machine a thread pool that waits for a lost core costs more than it computes."""

import torch

torch.set_num_threads(1)
