// Marks a part of a file as compiled for more than the processor that the rest is compiled for. Headers come before it: an inline
// function of theirs, compiled for AVX-512 here, could be the copy that the linker keeps for all callers.
#pragma once

#if defined(__clang__)
#define LAMB_PRAGMA(x) _Pragma(#x)
#define LAMB_TARGET_BEGIN(features) LAMB_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define LAMB_TARGET_END LAMB_PRAGMA(clang attribute pop)
#else
#define LAMB_PRAGMA(x) _Pragma(#x)
#define LAMB_TARGET_BEGIN(features) LAMB_PRAGMA(GCC push_options) LAMB_PRAGMA(GCC target(features))
#define LAMB_TARGET_END LAMB_PRAGMA(GCC pop_options)
#endif
