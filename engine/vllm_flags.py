"""Flags of vLLM 0.5 to 0.33 that mean nothing here, by how many values they take. The server's command line and `LLM` ignore them."""

SWITCHES = frozenset(
    """
    --aggregate-engine-logging --allow-credentials --async-scheduling --calculate-kv-scales --data-parallel-external-lb
    --data-parallel-hybrid-lb --disable-async-output-proc --disable-cascade-attn --disable-chunked-mm-input
    --disable-custom-all-reduce --disable-fastapi-docs --disable-frontend-multiprocessing --disable-hybrid-kv-cache-manager
    --disable-log-requests --disable-log-stats --disable-logprobs-during-spec-decoding --disable-mm-preprocessor-cache
    --disable-nccl-for-dp-synchronization --disable-sliding-window --disable-uvicorn-access-log --enable-auto-tool-choice
    --enable-chunked-prefill --enable-dbo --enable-eplb --enable-expert-parallel --enable-force-include-usage
    --enable-lora-bias --enable-log-deltas --enable-log-outputs --enable-log-requests --enable-mm-embeds
    --enable-multimodal-encoder-data-parallel --enable-offline-docs --enable-per-request-metrics --enable-prompt-adapter
    --enable-prompt-embeds --enable-prompt-tokens-details --enable-reasoning --enable-request-id-headers
    --enable-server-load-tracking --enable-sleep-mode --enable-ssl-refresh --enable-tokenizer-info-endpoint --enforce-eager
    --engine-use-ray --eplb-log-balancedness --exclude-tools-when-tool-choice-none --fully-sharded-loras
    --guided-decoding-disable-additional-properties --guided-decoding-disable-any-whitespace
    --guided-decoding-disable-fallback --headless --interleave-mm-strings --kv-sharing-fast-prefill --language-model-only
    --log-error-stack --multi-step-stream-outputs --ray-workers-use-nsight --return-tokens-as-token-ids --skip-mm-profiling
    --skip-tokenizer-init --speculative-disable-mqa-scorer --tokens-only --trust-remote-code --trust-request-chat-template
    --use-tqdm-on-load --use-v2-block-manager --worker-use-ray
    """.split()
)
TAKING_A_VALUE = frozenset(
    """
    --additional-config --all2all-backend --allowed-headers --allowed-local-media-path --allowed-methods --api-server-count -asc
    --attention-backend --block-size --chat-template-content-format --code-revision --collect-detailed-traces
    --compilation-config -cc -O --config-format --convert --cpu-offload-gb --data-parallel-address -dpa --data-parallel-backend -dpb
    --data-parallel-rank -dpn --data-parallel-rpc-port -dpp --data-parallel-size-local -dpl --data-parallel-start-rank -dpr
    --dbo-decode-token-threshold --dbo-prefill-token-threshold --decode-context-parallel-size -dcp
    --disable-access-log-for-endpoints --distributed-executor-backend --download-dir
    --eplb-config --eplb-step-interval --eplb-window-size --expert-placement-strategy --fingerprint-mode --fingerprint-value
    --guided-decoding-backend --h11-max-header-count --h11-max-incomplete-event-size --hf-config-path
    --hf-overrides --hf-token --io-processor-plugin --kv-events-config --kv-transfer-config --limit-mm-per-prompt
    --load-format --log-config-file --logits-processor-pattern --logprobs-mode --long-lora-scaling-factors
    --long-prefill-token-threshold --lora-dtype --lora-extra-vocab-size --mamba-block-size --mamba-cache-dtype
    --mamba-ssm-cache-dtype --max-context-len-to-capture --max-cpu-loras --max-cudagraph-capture-size --max-log-len
    --max-logprobs --max-long-partial-prefills --max-num-partial-prefills --max-num-queued-tokens
    --max-parallel-loading-workers --max-prompt-adapter-token --max-prompt-adapters --max-seq-len-to-capture --media-io-kwargs
    --middleware --mm-encoder-attn-backend --mm-encoder-tp-mode --mm-processor-cache-gb --mm-processor-cache-type
    --mm-processor-kwargs --mm-shm-cache-max-object-size-mb --model-impl --model-loader-extra-config --num-lookahead-slots
    --num-redundant-experts --num-scheduler-steps --otlp-traces-endpoint --override-attention-dtype
    --override-neuron-config --override-pooler-config --per-request-spec-decode-metrics --performance-mode
    --pooler-config
    --preemption-mode --prefix-caching-hash-algo --pt-load-map-location --qlora-adapter-name-or-path
    --renderer-num-workers --response-role --rope-scaling --rope-theta --runner --safetensors-load-strategy
    --scheduler-cls --scheduler-delay-factor --scheduling-policy --show-hidden-metrics-for-version
    --ssl-ciphers --structured-outputs-config --swap-space --task --tokenizer-mode
    --tokenizer-pool-extra-config --tokenizer-pool-size --tokenizer-pool-type
    --tool-parser-plugin --tool-server --typical-acceptance-sampler-posterior-alpha
    --typical-acceptance-sampler-posterior-threshold --video-pruning-rate --worker-cls --worker-extension-cls
    """.split()
)
TAKING_VALUES = frozenset(
    """
    --allowed-media-domains --cuda-graph-sizes --cudagraph-capture-sizes --default-mm-loras --ignore-patterns --logits-processors
    --prompt-adapters
    """.split()
)
NOTES = {
    "--block-size": "cache blocks hold 16 tokens",
    **dict.fromkeys(["--hf-overrides", "--rope-scaling", "--rope-theta"], "config.json is read as it is"),
    "--load-format": "weights are read from safetensors",
    "--hf-token": "set HF_TOKEN",
    "--download-dir": "set HF_HOME",
    "--enable-ssl-refresh": "start it again when the certificate is renewed",
    "--lora-dtype": "adapters have the model's dtype",
    "--max-cpu-loras": "all adapters are where the model is; --max-loras says how many",
    "--trust-remote-code": "code from a model folder is never run",
}
"""What a user of these should know beyond "ignored"."""
