// Kernels whose lanes meet, to try the emulation's warps themselves.
#pragma once
#include <string>

// The kernel of that name over three blocks: empty where every lane got what its warp should, else what
// differs. Throws where the lanes do not meet.
std::string run_warps(const std::string &kernel);
