// cuBLAS, as far as PyTorch calls it for dense layers: accepts everything and computes nothing.
#include <cstddef>
#include <cstdint>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))
#define ACCEPTED(name) \
  API int name() { return 0; }

namespace {

int some_handle(void** handle) {
  static int one;
  *handle = &one;
  return 0;
}

constexpr size_t kHeuristicResult = 96;  // bytes of a cublasLtMatmulHeuristicResult_t

}  // namespace

API int cublasCreate_v2(void** handle) { return some_handle(handle); }
API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
API int cublasLtMatmulDescCreate(void** handle, int, int) { return some_handle(handle); }
API int cublasLtMatrixLayoutCreate(void** handle, int, uint64_t, uint64_t, int64_t) { return some_handle(handle); }
API int cublasLtMatmulPreferenceCreate(void** handle) { return some_handle(handle); }
API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found, int* count) {
  memset(found, 0, kHeuristicResult);
  *count = 1;
  return 0;
}
ACCEPTED(cublasDestroy_v2)
ACCEPTED(cublasSetStream_v2)
ACCEPTED(cublasSetWorkspace_v2)
ACCEPTED(cublasSetMathMode)
ACCEPTED(cublasSetPointerMode_v2)
ACCEPTED(cublasSetSmCountTarget)
ACCEPTED(cublasSgemm_v2)
ACCEPTED(cublasDgemm_v2)
ACCEPTED(cublasGemmEx)
ACCEPTED(cublasGemmStridedBatchedEx)
ACCEPTED(cublasSgemmStridedBatched)
ACCEPTED(cublasDgemmStridedBatched)
ACCEPTED(cublasSgemmEx)
ACCEPTED(cublasSgemv_v2)
ACCEPTED(cublasDgemv_v2)
ACCEPTED(cublasDotEx)
ACCEPTED(cublasSdot_v2)
ACCEPTED(cublasDdot_v2)
ACCEPTED(cublasLtMatmulDescDestroy)
ACCEPTED(cublasLtMatmulDescSetAttribute)
ACCEPTED(cublasLtMatrixLayoutDestroy)
ACCEPTED(cublasLtMatrixLayoutSetAttribute)
ACCEPTED(cublasLtMatmulPreferenceDestroy)
ACCEPTED(cublasLtMatmulPreferenceSetAttribute)
ACCEPTED(cublasLtMatmul)
