// What the native tests share: a check that says where it failed, and a seeded generator.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                                      \
        }                                                                                      \
    } while (false)

using Generator = std::mt19937_64;

inline std::size_t below(Generator& generator, std::size_t limit) { return static_cast<std::size_t>(generator() % limit); }
