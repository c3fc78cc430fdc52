// Functions that can be called with their arguments as words of 64 bits each, by whoever keeps calls to make them again.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace again {

template <typename T>
T argument(int64_t word) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(word);
    if constexpr (std::is_floating_point_v<T>) {
        double number;
        std::memcpy(&number, &word, sizeof(number));
        return T(number);
    }
    if constexpr (std::is_integral_v<T>) return T(word);
}

template <typename... A, std::size_t... I>
void call(void (*function)(A...), const int64_t* words, std::index_sequence<I...>) {
    function(argument<A>(words[I])...);
}

template <typename... A>
void call(void (*function)(A...), const int64_t* words) {
    call(function, words, std::index_sequence_for<A...>{});
}

}  // namespace again

// name_again(words), beside name.
#define AGAIN(name) \
    extern "C" void name##_again(const int64_t* words) { again::call(name, words); }
