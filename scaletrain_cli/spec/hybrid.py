"""The sections of hybrid models: what each block consists of (model.block_types), and its state-space layers."""

from typing import Literal, NamedTuple

from pydantic import Field

from scaletrain_cli.spec.quantities import Whole, WholeOrZero
from scaletrain_cli.spec.section import Section

# Of a block: a mixer of tokens, an MLP, or one of each, with a norm and a residual sum for each.
BlockType = Literal[
    "attention", "mamba", "mlp", "experts", "attention+mlp", "attention+experts", "mamba+mlp", "mamba+experts"
]


class BlockParts(NamedTuple):
    """The sublayers of a block; a complete transformer block has attention and an MLP or experts."""

    attention: bool
    mamba: bool
    mlp: bool
    experts: bool

    @property
    def sublayers(self) -> int:
        """Return the number of modules with a norm and a residual sum of their own."""
        return sum(self)


DENSE_BLOCK = BlockParts(attention=True, mamba=False, mlp=True, experts=False)
SPARSE_BLOCK = BlockParts(attention=True, mamba=False, mlp=False, experts=True)


def parts_of(block_type: str) -> BlockParts:
    """Return the parts of a block type."""
    named = block_type.split("+")
    return BlockParts(*(part in named for part in BlockParts._fields))


class MambaSpec(Section):
    """Dimensions of a state-space layer: Mamba-2 (arXiv:2405.21060), or Mamba (arXiv:2312.00752) with ``dt_rank``."""

    num_heads: Whole = Field(description="Mamba: channels of the layer, each of which is a head of size 1")
    head_dim: Whole = 1
    state_size: Whole
    groups: Whole = Field(default=1, description="groups of heads that share B and C, Mamba-2")
    conv_kernel: Whole = 4
    conv_bias: bool = True
    proj_bias: bool = Field(default=False, description="biases of the input and output projections")
    chunk_size: Whole = Field(default=128, description="tokens that the scan of Mamba-2 computes as one product")
    dt_rank: WholeOrZero = Field(default=0, description="rank of the time steps' projection, Mamba; 0: Mamba-2")
    inner_norms: bool = Field(
        default=True, description="norm of the output (Mamba-2), or of time step, B and C (Mamba)"
    )

    @property
    def inner_size(self) -> int:
        """Return the channels of the layer."""
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Return the channels of the convolution: in Mamba-2 also B and C of each group."""
        return self.inner_size + (0 if self.dt_rank else 2 * self.groups * self.state_size)

    @property
    def projected_size(self) -> int:
        """Return the outputs of the input projection: gate, channels and, in Mamba-2, B, C and time steps."""
        return self.inner_size + self.conv_size + (0 if self.dt_rank else self.num_heads)
