// The path "neon-i8mm": ARMv8 with FEAT_DotProd and FEAT_I8MM.
#define SOCFLOWER_INT8_NAMESPACE neon_i8mm
#include "loops.inc"
#include "block_neon_i8mm.h"

namespace socflower::int8 {

extern const Path kNeonI8mmPath;
const Path kNeonI8mmPath = neon_i8mm::make_path("neon-i8mm", neon_i8mm::kMmlaInt8, neon_i8mm::kMmlaInt8,
                                                neon_i8mm::kWide);

}  // namespace socflower::int8
