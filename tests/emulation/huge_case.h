// A tensor of more elements than 32 bits count, in memory that is only reserved, and the few blocks of
// it that are run.
#pragma once
#include <stdint.h>

#include <string>

std::string run_huge(int64_t elements);
