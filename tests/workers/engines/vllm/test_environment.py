from search_spaces.study.engine import EngineOptions
from workers.engines.vllm.environment import engine_environment


def test_environment_keeps_a_core_free() -> None:
    """The environment keeps one core free and respects set variables."""
    environment = engine_environment(EngineOptions(), {"VLLM_LOGGING_LEVEL": "DEBUG"})
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert "VLLM_LOGGING_LEVEL" not in environment
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert engine_environment(EngineOptions(threads=3))["OMP_NUM_THREADS"] == "3"


def test_model_runner_is_pinned() -> None:
    """The model runner is the one that the study names, V1 by default, whatever the environment says."""
    for given in ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}):
        assert engine_environment(EngineOptions(), given)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert engine_environment(EngineOptions(model_runner="v2"))["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_products_of_matrices_are_in_full_float32() -> None:
    """Tensors of adapters are products of matrices, and an export has them in float32."""
    environment = engine_environment(EngineOptions(), {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"})
    assert environment["VLLM_FLOAT32_MATMUL_PRECISION"] == "highest"


def test_ranks_may_end_their_merge_before_vllm_kills_them() -> None:
    name = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    assert engine_environment(EngineOptions(tensor_parallel_size=2))[name] == "120"
    assert name not in engine_environment(EngineOptions(tensor_parallel_size=2), {name: "7"})
    assert name not in engine_environment(EngineOptions())
