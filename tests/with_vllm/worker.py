"""The server's side of `tests.with_vllm.weights`, which the worker imports by `--worker-extension-cls`."""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from tests.with_vllm.weights import keep_weights


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str


class FileTransfer(WeightTransferEngine):
    """Loads a file as vLLM's own transfers load what they receive."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass


class WorkerExtension:
    """Adds nothing to the worker; naming it is what imports this module before the model is loaded."""


utils.dispatch_cpu_unquantized_gemm = keep_weights
WeightTransferEngineFactory.register_engine("file", FileTransfer)
