"""Read at start-up when this folder is on PYTHONPATH: lets PyPI's torchvision, built for CUDA, be imported
beside a CPU build of torch.

Its own library does not load there, and `import torchvision` would die with "operator torchvision::nms does
not exist"; so the two operators that it describes at import are defined first.
"""

import sys


class _TorchvisionOperators:
    library = None  # kept: a library's definitions go with it

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                self.__class__.library = torch.library.Library("torchvision", "DEF")
                self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _TorchvisionOperators())
