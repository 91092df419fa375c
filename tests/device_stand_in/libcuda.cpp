// A libcuda.so.1 without a driver: PyTorch's libraries load with it, and call it for contexts alone.
#define API extern "C" __attribute__((visibility("default")))
#define NOT_SUPPORTED(name) \
  API int name() { return 801; }

API int cuCtxGetCurrent(void** context) {
  static int one;
  *context = &one;
  return 0;
}
API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  *active = 1;
  return 0;
}
API int cuGetErrorString(int, const char** text) {
  *text = "error of the stand-in's driver";
  return 0;
}
NOT_SUPPORTED(cuCtxSetCurrent)
NOT_SUPPORTED(cuDeviceGet)
NOT_SUPPORTED(cuDeviceGetAttribute)
NOT_SUPPORTED(cuDevicePrimaryCtxRetain)
NOT_SUPPORTED(cuFuncGetAttribute)
NOT_SUPPORTED(cuFuncSetAttribute)
NOT_SUPPORTED(cuFuncSetCacheConfig)
NOT_SUPPORTED(cuLaunchCooperativeKernel)
NOT_SUPPORTED(cuLaunchKernel)
NOT_SUPPORTED(cuLinkAddData_v2)
NOT_SUPPORTED(cuLinkComplete)
NOT_SUPPORTED(cuLinkCreate_v2)
NOT_SUPPORTED(cuModuleGetFunction)
NOT_SUPPORTED(cuModuleLoad)
NOT_SUPPORTED(cuModuleLoadData)
NOT_SUPPORTED(cuModuleLoadDataEx)
NOT_SUPPORTED(cuModuleUnload)
NOT_SUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOT_SUPPORTED(cuPointerGetAttribute)
NOT_SUPPORTED(cuTensorMapEncodeTiled)
