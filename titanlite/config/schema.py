"""What a run may say: every section and key of the TOML, its type, default and meaning. Torch-free.

All models are frozen and strict (`"8"`, `2.5` and `true` are not integers; an integer is accepted where a float
is wanted) and refuse unknown keys and NaN. No key is ever null, since TOML has no null: 0, "" or "auto" say
"not set" and the description says what that means. Rules that need more than one key are in check.py.
A key that torchtitan's TOML also has keeps its name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

EMBEDDED = "embedded"  # the path that means the text, or the tokenizer, that comes with the environment
EMBEDDED_VOCAB_SIZE = 4096
BLOCK = 1024  # samples in which every source has its share: data/order.py. Part of what a seed means; final


def _no_lookalike(value: object) -> object:
    """Python has `1 == True == 1.0`, so that a choice of integers would take true and 1.0 for 1."""
    if isinstance(value, (bool, float)):
        raise ValueError("neither true/false nor a fraction is a choice here")
    return value


Dtype = Literal["float32", "bfloat16"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
# Far above what anybody means, so that a slip of the keyboard is refused, not computed with.
Size = Annotated[int, Field(gt=0, lt=2**31)]
SizeOrZero = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Size  # what timers and torch's timeouts can count
SecondsOrZero = SizeOrZero
Count = Annotated[int, Field(gt=0, lt=2**16)]  # of layers, ranks
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _no_nul(cls, value: object) -> object:
        """No path can have a NUL character, and every call of the system that gets one raises."""
        if isinstance(value, str) and "\0" in value:
            raise ValueError("a NUL character")
        return value


class RunConfig(Section):
    name: str = Field("", description="Name of the run folder inside output_dir. Empty: the config file's stem.")
    output_dir: str = Field("outputs", description="Folder that holds the run folders.")
    seed: NonNegative = Field(42, description="Seed of the initial weights and of the sample order.")
    deterministic: bool = Field(
        False, description="Bitwise repeatable kernels: deterministic algorithms, no TF32. On CPU costs nothing."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description='Where to compute. "auto": CUDA if there is any.'
    )


class RopeScalingConfig(Section):
    """Llama 3.1's frequency scaling; off while factor is 1."""

    factor: Annotated[float, Field(ge=1.0)] = Field(1.0, description="How much slower low frequencies turn. 1: off.")
    low_freq_factor: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Wavelengths above original_max_position_embeddings / this are scaled by factor."
    )
    high_freq_factor: Annotated[float, Field(gt=0)] = Field(
        4.0, description="Wavelengths below original_max_position_embeddings / this are left alone."
    )
    original_max_position_embeddings: Positive = Field(8192, description="Context length before the scaling, tokens.")


class MoEConfig(Section):
    """Mixture of experts: each token goes through top_k of n_experts small MLPs. Off while n_experts is 0."""

    n_experts: SizeOrZero = Field(0, description="Routed experts of a layer. 0: every layer has one dense MLP.")
    top_k: SizeOrZero = Field(0, description="Experts that each token goes through; none is ever dropped.")
    expert_dim: SizeOrZero = Field(
        0, description="Inner width of one expert, a SwiGLU MLP; it and model.dim are multiples of 8."
    )
    n_shared_experts: SizeOrZero = Field(
        0, description="Every token also goes through one MLP of n_shared_experts x expert_dim."
    )
    first_k_dense: SizeOrZero = Field(0, description="The first layers, which keep a dense MLP of model.ffn_dim.")
    score_func: Literal["softmax", "sigmoid"] = Field(
        "softmax", description='What makes scores of the router\'s logits. "sigmoid": each expert by itself.'
    )
    route_norm: bool = Field(True, description="Scale a token's top_k weights to sum 1.")
    route_scale: Annotated[float, Field(gt=0)] = Field(1.0, description="Multiplies the weights, after route_norm.")
    bias_update_rate: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="DeepSeek-V3's balancing: after a step, the bias with which an expert is chosen moves so far, up "
        "if it had less than the mean load, down if more. 0: no bias.",
    )
    aux_loss_coeff: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the load balancing loss of each sequence. 0: none."
    )
    z_loss_coeff: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Weight of the squared logsumexp of the router's logits. 0: none."
    )


class ModelConfig(Section):
    vocab_size: Size = Field(description="Token ids the model knows; at least the tokenizer's size.")
    dim: Size = Field(description="Width of the residual stream.")
    n_layers: Count = Field(description="Transformer blocks.")
    n_heads: Size = Field(description="Query heads.")
    n_kv_heads: Size = Field(description="Key and value heads; divides n_heads.")
    head_dim: SizeOrZero = Field(0, description="Width of one head, even. 0: dim / n_heads.")
    ffn_dim: Size = Field(description="Inner width of the SwiGLU MLP of a dense layer.")
    norm_eps: Annotated[float, Field(gt=0)] = Field(1e-5, description="Epsilon of every RMSNorm.")
    rope_theta: Annotated[float, Field(gt=0)] = Field(10000.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScalingConfig = Field(RopeScalingConfig(), description="Llama 3.1 rotary frequency scaling.")
    qk_norm: bool = Field(False, description="RMSNorm over head_dim on queries and keys before RoPE.")
    tie_word_embeddings: bool = Field(False, description="The output projection is the embedding table.")
    vocab_pad_multiple: Size = Field(
        128, description="Embedding and output rows are padded with masked zero rows to a multiple of this."
    )
    init_std: Annotated[float, Field(gt=0)] = Field(
        0.02, description="Std of the initial weights; residual outputs get init_std / sqrt(2 n_layers)."
    )
    moe: MoEConfig = Field(MoEConfig(), description="Mixture of experts.")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and output parameters: vocab_size rounded up to vocab_pad_multiple."""
        return -(-self.vocab_size // self.vocab_pad_multiple) * self.vocab_pad_multiple

    @property
    def padded_tables(self) -> dict[str, tuple[int, int]]:
        """Parameters with a row for each token id: their rows, and how many of these, the first ones, are no padding.
        The output is not one of the model if the embeddings are tied."""
        return dict.fromkeys(("embedding.weight", "output.weight"), (self.padded_vocab_size, self.vocab_size))

    @property
    def resolved_head_dim(self) -> int:
        """Width of one head: head_dim, or dim // n_heads when that is 0."""
        return self.head_dim or self.dim // self.n_heads

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` (from 0) has experts in place of a dense MLP."""
        return self.moe.n_experts > 0 and index >= self.moe.first_k_dense


class TokenizerConfig(Section):
    path: str = Field(
        EMBEDDED,
        description="A sentencepiece .model file, or a Hugging Face tokenizer.json or its folder. "
        '"embedded": 4096 pieces trained from the embedded text.',
    )
    add_bos: bool = Field(False, description="Put the tokenizer's BOS id before every document.")
    add_eos: bool = Field(True, description="Put the tokenizer's EOS id after every document.")
    bos_token: str = Field(
        "", description="The piece that is BOS. Empty: the one that the tokenizer's own files name, if they do."
    )
    eos_token: str = Field(
        "", description="The piece that is EOS. Empty: the one that the tokenizer's own files name, if they do."
    )


class SourceConfig(Section):
    path: str = Field(
        EMBEDDED,
        description="Text (.txt, .jsonl, .parquet; .gz and .zst of the first two) or token files (shards that "
        "`titanlite prepare` wrote, .bin of nanoGPT, llm.c or Megatron): a file, a folder or a glob. "
        '"embedded": the Python source of the installed sympy.',
    )
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="Share of samples, relative to the other sources.")
    text_key: str = Field("text", description="Key (.jsonl) or column (.parquet) that holds a document's text.")
    separator: str = Field(
        "", description="What parts the documents of a .txt file, such as <|endoftext|>. Empty: a file is one document."
    )
    validation_path: str = Field(
        "",
        description="Held-out text or tokens of this source, read as path is. Empty: data.validation_fraction of the "
        "documents of a text, or what lies beside the tokens.",
    )


class DataConfig(Section):
    sources: tuple[SourceConfig, ...] = Field(
        (SourceConfig(),),
        min_length=1,
        strict=False,
        description="Where the tokens come from: [[data.sources]] tables.",
    )
    epochs: NonNegative = Field(
        0, description="The run ends before any source would be read more often than this. 0: no limit."
    )
    validation_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.01, description="Share of documents, chosen by their hash when tokenising, that is held out for validation."
    )
    document_mask: bool = Field(
        False,
        description="Attention stays within a document; positions are not reset. Needs tokenizer.add_bos or add_eos.",
    )
    allow_change: bool = Field(
        False,
        description="At resume, accept other sources and weights than the checkpoint's (annealing): kept sources go on "
        "where they were, new ones start at their beginning. Gives up that this file alone reproduces the run.",
    )
    on_error: Literal["stop", "skip"] = Field(
        "stop", description='What a record that cannot be read does: "stop", or "skip", which counts and reports it.'
    )
    prepare_workers: NonNegative = Field(0, description="Processes that tokenise text on first use. 0: one per core.")
    num_workers: NonNegative = Field(0, description="Loader processes per rank. 0: read in the training process.")
    cache_dir: str = Field("outputs/cache", description="Where tokenised text and trained tokenizers are kept.")


class TrainingConfig(Section):
    seq_len: Size = Field(description="Tokens of a sample.")
    global_batch_size: Size = Field(description="Samples of an optimizer step, over all ranks.")
    allow_batch_change: bool = Field(
        False,
        description="At resume, accept another global_batch_size than the checkpoint's: the run goes on with the next "
        "sample, the learning rate with the next step. Gives up that this file alone reproduces the run.",
    )
    local_batch_size: Positive = Field(
        1,
        description="Most samples a rank puts through one forward pass, or one run of a pipeline's schedule; the rest "
        "is accumulated.",
    )
    steps: Positive = Field(description="Optimizer steps after which the run is finished.")
    max_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Gradient norm is clipped to this. 0: no clipping."
    )
    mixed_precision_param: Dtype = Field("bfloat16", description="Dtype of activations and of weights in matmuls.")
    mixed_precision_reduce: Dtype = Field(
        "float32",
        description="Dtype in which gradients are summed over ranks. Under a pipeline or zero_stage 1: over dp_shard x "
        "cp; replicas are then summed in float32.",
    )
    loss_chunk_tokens: NonNegative = Field(
        1024, description="Tokens whose logits exist at once. 0: all of them (plain path, kept as reference)."
    )
    gc_freq: NonNegative = Field(
        50, description="Garbage is collected every so many steps, on all ranks at once. 0: left to Python."
    )


class OptimizerConfig(Section):
    """Fused AdamW; weight decay on parameters with two or more dims."""

    lr: Annotated[float, Field(gt=0)] = Field(3e-4, description="Peak learning rate.")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="Decay of the first moment.")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.95, description="Decay of the second moment.")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="Added to the root of the second moment.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="Decoupled weight decay.")


class LRSchedulerConfig(Section):
    """Linear warmup, a stable part, a decay to min_lr_factor, which then holds."""

    warmup_steps: NonNegative = Field(0, description="Steps of linear rise to the peak; step 1 is not at 0.")
    total_steps: Positive = Field(description="Length of the whole schedule, whatever training.steps is.")
    decay_ratio: Fraction = Field(
        1.0,
        description="Share of total_steps spent decaying, at the end. 1: all that warmup leaves. 0: no decay, ever.",
    )
    decay_type: Literal["linear", "cosine", "sqrt"] = Field("cosine", description="Shape of the decay.")
    min_lr_factor: Fraction = Field(0.1, description="The LR at and past the end of the decay, as a share of the peak.")

    @property
    def decay_steps(self) -> int:
        """Steps of decay that decay_ratio asks for: at least one unless it is 0. Warmup may leave fewer."""
        return max(1, round(self.decay_ratio * self.total_steps)) if self.decay_ratio else 0


class ParallelismConfig(Section):
    dp_replicate: Count = Field(1, description="Whole copies of the model, which share the sum of their gradients.")
    dp_shard: Annotated[int, Field(ge=-1, lt=2**16)] = Field(
        -1, description="Ranks that share parameters, gradients and optimizer state. -1: what is left of the world."
    )
    tp: Count = Field(1, description="Tensor parallel degree.")
    pp: Count = Field(1, description="Pipeline parallel degree.")
    cp: Count = Field(1, description="Context parallel degree: ranks that share each sequence.")
    ep: Count = Field(1, description="Expert parallel degree.")
    cp_method: Literal["ring", "allgather"] = Field(
        "ring",
        description='"ring": keys and values travel around the cp ranks while they compute; no rank holds all of them. '
        '"allgather": every rank gathers them; needed for data.document_mask.',
    )
    zero_stage: Annotated[Literal["auto", 1, 2, 3], BeforeValidator(_no_lookalike)] = Field(
        "auto",
        description="3 frees parameters after forward; 2 keeps them through the step and reduce-scatters every "
        'microbatch; 1 reduces once a step. "auto": 3, or 1 under a pipeline.',
    )
    pp_schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = Field("1F1B", description="The order in which pipeline stages take their microbatches.")
    pp_microbatches: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="Microbatches into which a schedule run's samples are cut. 0: microbatches of one sample."
    )
    pp_layers_per_stage: tuple[Positive, ...] = Field(
        (), strict=False, description="Layers of every pipeline stage, in order. []: balanced by cost."
    )


class ActivationCheckpointConfig(Section):
    mode: Literal["none", "full", "selective"] = Field(
        "none", description='"full": recompute every block in backward. "selective": as selective_ac_option says.'
    )
    selective_ac_option: str = Field(
        "op",
        description='What "selective" recomputes. "op": of every block, all but what attention and its matrices made. '
        'A number, as text: "2": every second block in full.',
    )

    def of_layer(self, index: int) -> Literal["none", "full", "op"]:
        """What is recomputed of layer `index` of the whole model: nothing, all, or what selective_ac_option "op" says.

        Of every n layers the last one is recomputed, whatever stage of a pipeline it is on.
        """
        if self.mode != "selective":
            return self.mode
        if self.selective_ac_option == "op":
            return "op"
        return "none" if (index + 1) % int(self.selective_ac_option) else "full"


class CompileConfig(Section):
    enable: bool = Field(False, description="torch.compile every transformer block.")


class CheckpointConfig(Section):
    enable: bool = Field(True, description="Save checkpoints, and resume from them.")
    interval: Positive = Field(500, description="Steps between two checkpoints. The last step is always saved.")
    keep_latest_k: NonNegative = Field(3, description="Committed checkpoints that are kept. 0: all.")
    keep_every: NonNegative = Field(
        0, description="Checkpoints of the multiples of this number of steps are kept for good, besides. 0: none."
    )
    async_mode: Literal["disabled", "async"] = Field(
        "async", description='"async": training goes on while the snapshot is written.'
    )
    resume: str = Field(
        "auto",
        description='"auto": from the newest checkpoint of the run folder, if any. "never": refused when there is one. '
        "Else the path of a step folder.",
    )
    init_from: str = Field(
        "",
        description="Weights to start from when there is nothing to resume: a step folder, a run folder (its newest "
        "checkpoint), or the folder of a Hugging Face model. Steps, optimizer, learning rate and data start anew.",
    )
    allow_rope_change: bool = Field(
        False,
        description="With init_from, accept another model.rope_theta and model.rope_scaling than the weights were made "
        "with, for longer sequences. Gives up that the run starts with the loss that the weights had.",
    )
    grace_seconds: Seconds = Field(
        600, description="How long the ranks may take to save once a signal has asked for it; then they are ended."
    )
    before_walltime: SecondsOrZero = Field(
        0,
        description="Seconds before the end of the job at which to save and exit with 75: more than a step, a "
        "validation and two saves take together. 0: never.",
    )
    walltime: SecondsOrZero = Field(
        0, description="Seconds that the job may take. SLURM_JOB_END_TIME counts where Slurm sets it. 0: not known."
    )


class ValidationConfig(Section):
    enable: bool = Field(False, description="Measure the loss on held-out documents.")
    freq: Positive = Field(
        100, description="Steps between two validation passes; there is one after the last step, too."
    )
    samples: NonNegative = Field(64, description="Held-out samples of a pass, always the same. 0: all of them.")


class MetricsConfig(Section):
    log_freq: Positive = Field(10, description="Steps between two rows of metrics.")
    enable_tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    peak_tflops: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Peak of one device in TFLOP/s for the MFU. 0: the datasheet's for known GPUs, else measured."
    )


class CommConfig(Section):
    init_timeout_seconds: Seconds = Field(300, description="Longest wait for all ranks to start.")
    train_timeout_seconds: Seconds = Field(100, description="Longest wait in one collective once training runs.")


class Config(Section):
    """One pretraining run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: LRSchedulerConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    comm: CommConfig = CommConfig()
