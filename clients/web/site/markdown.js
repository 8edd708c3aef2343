import{b as a}from"./chunk-LEKDKQUC.js";import"./chunk-DP57X223.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
