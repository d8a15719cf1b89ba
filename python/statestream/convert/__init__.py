"""Optimizer checkpoints of torch.optim.AdamW, FusedAdam and Transformer Engine's FusedAdam, each as another's.

    convert_state_dict    a state dict in memory
    convert_checkpoint    a folder of torch.distributed.checkpoint, streamed, in bounded memory
    convert_file          a file of torch.save, mapped
    fp32_weights          the weights that masters and remainders hold, for an optimizer that keeps none

State that has no place in the other form is refused by name; `drop` says what may be lost.
"""

from statestream.convert.files import convert_file
from statestream.convert.folders import convert_checkpoint
from statestream.convert.state_dicts import convert_state_dict, fp32_weights

__all__ = ["convert_checkpoint", "convert_file", "convert_state_dict", "fp32_weights"]
